//! The program, as processes.

use std::path::Path;
use std::process::{Child, Command, Stdio};

use serde_json::Value;
use sidelane::gate::Recorded;

use crate::case::TEXT;

/// The command of a small run, which writes into `out`.
fn program(out: &Path, text: &Path) -> Command {
    program_of(6, out, text)
}

/// The same of so many steps.
fn program_of(steps: u32, out: &Path, text: &Path) -> Command {
    let sizes = "--vocabulary 256 --window 16 --layers 2 --width 32 --heads 2 --experts 16 --top-k 2 --expert-width 16";
    let run = "--batch 4 --warm-up 2 --expert-parallel 2 --checkpoint-every 2 --json";
    let mut command = Command::new(env!("CARGO_BIN_EXE_moe-lm"));
    command.args(sizes.split(' ')).args(run.split(' ')).args(["--steps", &steps.to_string()]);
    command.arg("--out").args([out, text]);
    command.env("RAYON_NUM_THREADS", "1").env("SIDELANE_HEAP", "96M").stdout(Stdio::piped());
    command
}

fn ranks<'a>(out: &Path, text: &Path, job: &str, more: impl Fn(u32) -> &'a [&'a str]) -> Vec<Child> {
    ranks_of(|| program(out, text), job, more)
}

/// Four ranks of this command.
pub fn ranks_of<'a>(
    command: impl Fn() -> Command,
    job: &str,
    more: impl Fn(u32) -> &'a [&'a str],
) -> Vec<Child> {
    many_ranks_of(4, command, job, more)
}

/// So many ranks of this command.
pub fn many_ranks_of<'a>(
    ranks: u32,
    command: impl Fn() -> Command,
    job: &str,
    more: impl Fn(u32) -> &'a [&'a str],
) -> Vec<Child> {
    let rank = |rank: u32| {
        let mut command = command();
        let job = format!("moe-lm-{job}-{}", std::process::id());
        command.args(more(rank)).envs([("MASTER_ADDR", "127.0.0.1"), ("SIDELANE_JOB", &job)]);
        command.envs(["WORLD_SIZE", "LOCAL_WORLD_SIZE"].map(|name| (name, ranks.to_string())));
        // Ranks that wait in vain end, and so does the test.
        command.env("SIDELANE_DEADLINE_MS", "60000");
        command.envs(["RANK", "LOCAL_RANK"].map(|name| (name, rank.to_string())));
        command.stderr(Stdio::piped()).spawn().unwrap()
    };
    (0..ranks).map(rank).collect()
}

/// Output of the ranks, one object per line.
pub fn said(ranks: Vec<Child>) -> Vec<Vec<Value>> {
    let rank = |rank: Child| {
        let output = rank.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        lines(output.stdout)
    };
    ranks.into_iter().map(rank).collect()
}

/// The objects that a process printed, one per line.
pub fn lines(output: Vec<u8>) -> Vec<Value> {
    let text = String::from_utf8(output).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn processes_write_what_one_that_plays_them_writes() {
    let folder = tempfile::tempdir().unwrap();
    let [text, out, beside] = ["text.md", "out", "beside"].map(|name| folder.path().join(name));
    std::fs::write(&text, TEXT).unwrap();
    let lines = said(ranks(&out, &text, "first", |_| &[]));
    assert!(lines[1..].iter().all(Vec::is_empty), "only the first rank speaks");
    let steps: Vec<&Value> = lines[0].iter().filter(|line| line["loss"].is_number()).collect();
    assert_eq!(steps.len(), 6);
    // The last step is saved once, though the number divides it.
    assert_eq!(checkpoints(&lines[0]), ["step-000002", "step-000004", "step-000006"]);

    let losses = out.join("losses.json");
    let alone = program(&beside, &text).args(["--reference", "4", "--beside"]).arg(&losses).spawn().unwrap();
    let lines = said(vec![alone]);
    let compared = lines[0].iter().find(|line| line["compared"] == 6).unwrap();
    assert_eq!((compared["most"].as_f64(), compared["last"].as_f64()), (Some(0.0), Some(0.0)));
    for name in ["losses.json", "routing.jsonl"] {
        assert_eq!(
            std::fs::read(out.join(name)).unwrap(),
            std::fs::read(beside.join(name)).unwrap(),
            "{name}"
        );
    }
    let recorded = Recorded::parse(&std::fs::read_to_string(out.join("routing.jsonl")).unwrap()).unwrap();
    assert_eq!((recorded.experts(), recorded.top_k(), recorded.tokens()), (Some(16), 2, 4096));
    assert!(std::fs::read_to_string(beside.join("losses.svg")).unwrap().contains("polyline"));

    // From the checkpoint after step 4, the last two again.
    std::fs::remove_dir_all(out.join("step-000006")).unwrap();
    let before = std::fs::read(&losses).unwrap();
    let lines = said(ranks(&out, &text, "again", |_| &["--resume"]));
    assert_eq!(lines[0].iter().filter(|line| line["loss"].is_number()).count(), 2);
    assert!(lines[0][0]["resumed"].as_str().unwrap().ends_with("step-000004"));
    assert_eq!(checkpoints(&lines[0]), ["step-000006"]);
    assert_eq!(std::fs::read(&losses).unwrap(), before);
    // And from the last: there is no step left to train or save.
    let lines = said(ranks(&out, &text, "last", |_| &["--resume"]));
    assert!(checkpoints(&lines[0]).is_empty());
    assert_eq!(std::fs::read(&losses).unwrap(), before);
}

#[test]
fn layers_on_gpus_learn_the_bits_of_those_on_hosts() {
    let folder = tempfile::tempdir().unwrap();
    let [text, out, beside] = ["text.md", "out", "beside"].map(|name| folder.path().join(name));
    std::fs::write(&text, TEXT).unwrap();
    said(ranks_of(|| on_gpus(&out, &text), "gpus", |_| &[]));
    said(vec![program_of(2, &beside, &text).args(["--reference", "4"]).spawn().unwrap()]);
    for name in ["losses.json", "routing.jsonl"] {
        let [gpus, host] = [&out, &beside].map(|out| std::fs::read(out.join(name)).unwrap());
        assert!(gpus == host, "{name}");
    }
}

#[test]
fn layers_with_products_of_cublas_learn_nearly_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let [text, out, beside] = ["text.md", "out", "beside"].map(|name| folder.path().join(name));
    std::fs::write(&text, TEXT).unwrap();
    said(ranks_of(|| on_gpus(&out, &text), "cublas", |_| &["--products", "cublas"]));
    said(vec![program_of(2, &beside, &text).args(["--reference", "4"]).spawn().unwrap()]);
    let [cublas, host] = [&out, &beside].map(|out| -> Vec<f64> {
        let text = std::fs::read_to_string(out.join("losses.json")).unwrap();
        let losses: Value = serde_json::from_str(&text).unwrap();
        losses["losses"].as_array().unwrap().iter().map(|loss| loss.as_f64().unwrap()).collect()
    });
    assert!(cublas.len() == 2 && host.len() == 2);
    assert!(cublas.iter().zip(&host).all(|(a, b)| (a - b).abs() < 1e-4), "{cublas:?} {host:?}");
}

#[test]
fn products_of_cublas_are_refused_on_a_host() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = program(folder.path(), &folder.path().join("text.md"));
    let output = command.args(["--products", "cublas"]).stderr(Stdio::piped()).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(
        String::from_utf8_lossy(&output.stderr)
            .contains("--products cublas and cublas-tf32 need --device cuda")
    );
}

/// Two steps with layers on devices of the fake driver.
fn on_gpus(out: &Path, text: &Path) -> Command {
    let (driver, kernels) = (fake_cuda::install().unwrap(), fake_cuda::all_kernels().unwrap());
    let mut command = program_of(2, out, text);
    command.env("LD_LIBRARY_PATH", driver).env("SIDELANE_FAKE_CUDA_KERNELS", kernels);
    command.args(["--device", "cuda", "--token-chunks", "2"]);
    command
}

/// Checkpoints that a run reported as written.
fn checkpoints(lines: &[Value]) -> Vec<&str> {
    let wrote = lines.iter().filter_map(|line| line["wrote"].as_str()?.rsplit('/').next());
    wrote.filter(|name| name.starts_with("step-")).collect()
}

#[test]
fn unusable_paths_end_all_ranks_before_first_step() {
    let folder = tempfile::tempdir().unwrap();
    let [text, out] = ["text.md", "out"].map(|name| folder.path().join(name));
    std::fs::write(&text, TEXT).unwrap();
    let missing = folder.path().join("missing.json").into_os_string().into_string().unwrap();
    let beside = ["--beside", &missing];
    let within = text.join("out");
    for (job, out, more, named) in
        [("within", &within, &[][..], "text.md/out"), ("beside", &out, &beside[..], "missing.json")]
    {
        for (rank, child) in ranks(out, &text, job, |_| more).into_iter().enumerate() {
            let output = child.wait_with_output().unwrap();
            let [said, steps] = [output.stderr, output.stdout].map(|said| String::from_utf8(said).unwrap());
            assert!(output.status.code() == Some(1) && said.contains(named), "{job}, {rank}: {said}");
            assert!(steps.is_empty(), "{job}, {rank}: {steps}");
        }
    }
    assert!(!out.exists());
}

#[test]
fn ranks_that_would_learn_different_things_do_not_begin() {
    let folder = tempfile::tempdir().unwrap();
    let [text, out] = ["text.md", "out"].map(|name| folder.path().join(name));
    std::fs::write(&text, TEXT).unwrap();
    let seed = ranks(&out, &text, "seed", |rank| if rank == 2 { &["--seed", "5"] } else { &[] });
    for rank in seed {
        let output = rank.wait_with_output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(
            !output.status.success() && said.contains("rank 2 was started with other settings"),
            "{said}"
        );
    }
    assert!(!out.exists());
}

#[test]
fn sizes_that_learn_nothing_or_exceed_memory_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("text.md");
    std::fs::write(&text, TEXT).unwrap();
    for (size, value, named) in [
        ("--window", "0", "a window"),
        ("--layers", "0", "layers"),
        ("--vocabulary", "0", "different tokens"),
        ("--window", "100000000000", "values of the mask"),
        ("--vocabulary", "1152921504606846976", "weights"),
        ("--experts", "4294967360", "weights"),
        ("--layers", "1152921504606846976", "weights"),
        ("--top-k", "4294967304", "experts that a token chooses"),
        ("--batch", "1152921504606846976", "are needed"),
        ("--rate", "NaN", "learning rate"),
        ("--balance", "inf", "coefficient of the balance"),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_moe-lm"));
        let refused = command.arg(&text).args([size, value]).output().unwrap();
        let said = String::from_utf8(refused.stderr).unwrap();
        assert!(refused.status.code() == Some(1) && said.contains(named), "{size}: {said}");
    }
}

#[test]
fn options_that_cannot_be_meant_are_refused() {
    for (options, named) in [
        ("--checkpoint-every 0", "--checkpoint-every"),
        ("--token-chunks 0", "--token-chunks"),
        ("--token-chunks some", "neither auto nor a number"),
        ("--reference 4 --token-chunks 2", "--reference"),
        ("--reference 4 --overlap on", "--reference"),
        ("--reference 4,3@5,2@5", "steps must ascend"),
        ("--reference 4,3", "is not two numbers"),
        ("--mesh dp=4 --reference 4,3@5", "--reference with --mesh is one number"),
        ("--kill 2", "is not two numbers"),
        ("--survive --device cuda", "--survive needs --device cpu"),
    ] {
        let refused = Command::new(env!("CARGO_BIN_EXE_moe-lm")).args(options.split(' ')).output().unwrap();
        let said = String::from_utf8(refused.stderr).unwrap();
        assert!(refused.status.code() == Some(2) && said.contains(named), "{options}: {said}");
    }
}

#[test]
fn one_that_plays_all_ranks_is_not_one_of_several() {
    let folder = tempfile::tempdir().unwrap();
    let [text, out] = ["text.md", "out"].map(|name| folder.path().join(name));
    std::fs::write(&text, TEXT).unwrap();
    for rank in ranks(&out, &text, "several", |_| &["--reference", "4"]) {
        let output = rank.wait_with_output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(1) && said.contains("--reference plays all ranks"), "{said}");
    }
}
