//! A ring all-reduce, written with nothing but one-sided puts and signals.
//!
//! ```text
//!   step 0 .. n-2     my part goes right, what comes from the left is added to mine      (reduce-scatter)
//!   step n-1 .. 2n-3  finished parts go round                                            (all-gather)
//! ```
//!
//! Each step has an inbox of its own, so no rank overwrites bytes that its neighbor still reads.
//! Run it with four threads as ranks, or as processes:
//!
//! ```text
//!   cargo run --release --example one_sided
//!   sidelane launch --nodes 1 --ranks-per-node 4 -- target/release/examples/one_sided
//! ```

use std::time::Instant;

use sidelane::{Result, Window, World};

/// Elements that are summed over all ranks. No multiple of the number of ranks.
const ELEMENTS: usize = 1_000_003;

fn main() -> Result<()> {
    if std::env::var_os("RANK").is_some() {
        println!("{}", all_reduce_on(&World::from_env()?)?);
        return Ok(());
    }
    for line in on_threads()? {
        println!("{line}");
    }
    Ok(())
}

/// Four ranks that are threads; what each has to say.
pub fn on_threads() -> Result<Vec<String>> {
    let ranks = World::threads(4)?.into_iter().map(|world| std::thread::spawn(move || all_reduce_on(&world)));
    let ranks: Vec<_> = ranks.collect();
    ranks.into_iter().map(|rank| rank.join().expect("a rank panicked")).collect()
}

/// Sums a vector over the ranks of a world, checks the sum, and says how it went.
fn all_reduce_on(world: &World) -> Result<String> {
    let (rank, ranks) = (world.rank() as usize, world.size() as usize);
    let inbox = ELEMENTS.div_ceil(ranks) * size_of::<f32>();
    let mut window = world.all()?.window((2 * ranks * inbox) as u64)?;
    // Rank r holds r, 2r, 3r, ...: small integers, whose sums are exact in any order.
    let mut data: Vec<f32> = (0..ELEMENTS).map(|i| (rank * (i % 1000)) as f32).collect();

    window.barrier()?;
    let start = Instant::now();
    all_reduce(&mut window, rank, ranks, &mut data)?;
    let time = start.elapsed();
    window.barrier()?;

    let of_all = ranks * (ranks - 1) / 2;
    let right = data.iter().enumerate().all(|(i, &sum)| sum == (of_all * (i % 1000)) as f32);
    let verdict = if right { "the sum is right" } else { "THE SUM IS WRONG" };
    Ok(format!("rank {rank} of {ranks}: {ELEMENTS} elements in {} us, {verdict}", time.as_micros()))
}

/// Adds up `data` over all ranks.
fn all_reduce(window: &mut Window, rank: usize, ranks: usize, data: &mut [f32]) -> Result<()> {
    let (left, right) = (((rank + ranks - 1) % ranks) as u32, ((rank + 1) % ranks) as u32);
    let most = data.len().div_ceil(ranks);
    let part = |index: usize| (index * most).min(data.len())..((index + 1) * most).min(data.len());
    let parts: Vec<_> = (0..ranks).map(part).collect();
    let mut incoming = vec![0.0f32; most];
    for step in 0..2 * (ranks - 1) {
        let inbox = (step * most * size_of::<f32>()) as u64;
        // Counted backwards around the ring: what came in one step goes out in the next.
        let out = &data[parts[(rank + 2 * ranks - step) % ranks].clone()];
        window.put_signal(right, inbox, bytemuck::cast_slice(out), step as u64 + 1)?;
        let mine = &mut data[parts[(rank + 2 * ranks - step - 1) % ranks].clone()];
        window.wait_until(left, step as u64 + 1)?;
        let seen = &mut incoming[..mine.len()];
        window.read(inbox, bytemuck::cast_slice_mut(seen))?;
        match step < ranks - 1 {
            true => mine.iter_mut().zip(seen).for_each(|(sum, x)| *sum += *x),
            false => mine.copy_from_slice(seen),
        }
    }
    Ok(())
}
