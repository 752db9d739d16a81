//! Every instruction set gives the same bits. The set is chosen when a world is built, from the
//! environment, so each runs in a process of its own.

use std::process::Command;

use crate::support::{on_ranks, small, tokens};
use half::bf16;
use sidelane::digest::Digest;
use sidelane::gate::Routing;
use sidelane::plan::SumOrder;
use sidelane::{Dtype, ExpertParallel, World};

const CHILD: &str = "SIDELANE_TEST_DIGEST";
const MARK: &str = "digest ";

/// Digest of all that a layer's forward and backward leave on all ranks.
fn digest() -> u64 {
    let shares = on_ranks(&[0, 0, 1, 1], &small(), |world| {
        let group = world.all().unwrap();
        let builder =
            ExpertParallel::builder(&group).experts(5).top_k(3).hidden(104).sum_order(SumOrder::Rank);
        let mut ep = builder.dtype(Dtype::Bf16).weighted(true).align(4).build().unwrap();
        let mine = tokens::<bf16>(u64::from(world.rank()), 33, 104, 3, 5);
        let routing = Routing::new(3, mine.ids.as_slice(), mine.weights.as_slice()).unwrap();
        let (rows, handle) = ep.dispatch(&mine.x, &routing).unwrap();
        let rows = rows.to_vec::<bf16>().unwrap();
        let out: Vec<bf16> = ep.combine(&rows, &handle).unwrap();
        let (back, weights) = ep.combine_backward(&out, &handle).unwrap();
        let (x, _) = ep.dispatch_backward::<bf16>(back.rows::<bf16>().unwrap(), None, &handle).unwrap();
        let tensors = [&rows, &out, &x].map(|tensor| bytemuck::cast_slice::<bf16, u8>(tensor));
        [&tensors.concat(), bytemuck::cast_slice::<f32, u8>(&weights.unwrap())].concat()
    });
    Digest::of(shares.concat())
}

/// Output of a process that is told to use this set; `None` if the CPU lacks it.
fn digest_with(simd: &str) -> Option<String> {
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "simd::every_set_gives_the_same_bits", "--nocapture"])
        .env(sidelane::rows::SIMD_VARIABLE, simd)
        .env(CHILD, "1")
        .output()
        .unwrap();
    let said = String::from_utf8(child.stdout).unwrap();
    assert!(child.status.success(), "{simd}: {said}");
    let digest = said.lines().find_map(|line| line.split_once(MARK)).map(|(_, digest)| digest.to_owned());
    assert!(digest.is_some(), "{simd}: {said}");
    digest.filter(|digest| digest != "missing")
}

#[test]
fn every_set_gives_the_same_bits() {
    if std::env::var_os(CHILD).is_some() {
        return match World::threads(1) {
            Ok(_) => println!("{MARK}{:#x}", digest()),
            Err(sidelane::Error::Simd(_)) => println!("{MARK}missing"),
            Err(error) => panic!("{error}"),
        };
    }
    let portable = digest_with("portable").expect("every CPU has the portable set");
    for simd in ["avx2", "avx512"] {
        match digest_with(simd) {
            Some(digest) => assert_eq!(digest, portable, "{simd}"),
            None => println!("skipped {simd}: this CPU lacks it"),
        }
    }
}
