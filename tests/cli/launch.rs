//! `sidelane launch` as a user sees it: the environment of ranks, the named rank when one fails,
//! and that no process outlives the launcher unnoticed.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Output, Stdio};

fn launch(options: &[&str], script: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sidelane"));
    command.arg("launch").args(options).args(["--", "sh", "-c", script]);
    command
}

fn run(options: &[&str], script: &str) -> Output {
    launch(options, script).output().unwrap()
}

fn lines(bytes: &[u8]) -> BTreeSet<String> {
    String::from_utf8_lossy(bytes).lines().map(str::to_owned).collect()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A launcher whose ranks have all printed "ready"; their later output is still to be read.
fn launch_until_ready(options: &[&str], script: &str, ranks: usize) -> (Child, BufReader<impl Read>) {
    let mut child = launch(options, script).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    for _ in 0..ranks {
        let mut line = String::new();
        out.read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
    }
    (child, out)
}

fn rest(mut from: impl Read) -> String {
    let mut text = String::new();
    from.read_to_string(&mut text).unwrap();
    text
}

#[test]
fn ranks_learn_their_place() {
    let output = run(
        &["--nodes", "2", "--ranks-per-node", "2"],
        "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK $SIDELANE_NODE $MASTER_ADDR",
    );
    assert!(output.status.success(), "{}", stderr(&output));
    let expected = ["0/4 0/2 0 0", "1/4 1/2 0 0", "2/4 0/2 1 1", "3/4 1/2 1 1"];
    assert_eq!(lines(&output.stdout), expected.iter().map(|line| format!("{line} 127.0.0.1")).collect());
}

#[test]
fn nodes_may_differ_in_size() {
    let output = run(&["--ranks-per-node", "1,2"], "echo $RANK $SIDELANE_NODE $LOCAL_RANK/$LOCAL_WORLD_SIZE");
    assert_eq!(lines(&output.stdout), ["0 0 0/1", "1 1 0/2", "2 1 1/2"].map(str::to_owned).into());
}

#[test]
fn ranks_may_be_left_to_run_anywhere() {
    let script = "grep Cpus_allowed_list /proc/self/status";
    let here = Command::new("sh").args(["-c", script]).output().unwrap();
    let output = run(&["--ranks-per-node", "2", "--bind", "none"], script);
    assert_eq!(lines(&output.stdout), lines(&here.stdout));
}

#[test]
fn ranks_share_secret_and_ports_that_differ_between_jobs() {
    let script = "echo $SIDELANE_SECRET $TORCHELASTIC_RUN_ID $((MASTER_PORT != SIDELANE_PORT))";
    let jobs = [(); 2].map(|()| lines(&run(&["--ranks-per-node", "3"], script).stdout));
    for job in &jobs {
        assert_eq!(job.len(), 1, "all ranks print the same line: {job:?}");
        let line: Vec<&str> = job.first().unwrap().split(' ').collect();
        assert!(line[0].len() == 64 && line[0].bytes().all(|b| b.is_ascii_hexdigit()), "{line:?}");
        assert_eq!(line[2], "1", "two different ports");
    }
    assert_ne!(jobs[0], jobs[1]);
}

#[test]
fn tags_name_the_rank_of_each_line() {
    let output = run(&["--ranks-per-node", "2", "--tag-output"], "echo out; printf err >&2");
    assert_eq!(lines(&output.stdout), ["[0] out", "[1] out"].map(str::to_owned).into());
    assert_eq!(lines(&output.stderr), ["[0] err", "[1] err"].map(str::to_owned).into());
}

#[test]
fn a_failing_rank_is_named_and_its_status_is_the_jobs() {
    let output = run(&["--nodes", "2", "--ranks-per-node", "2"], "[ $RANK != 3 ] || exit 7");
    assert_eq!(output.status.code(), Some(7));
    assert!(stderr(&output).contains("rank 3 (node 1) exited with status 7"), "{}", stderr(&output));
}

#[test]
fn a_rank_ended_by_a_signal_is_named_with_it() {
    let output = run(&["--ranks-per-node", "2"], "[ $RANK != 1 ] || kill -SEGV $$");
    assert_eq!(output.status.code(), Some(128 + 11));
    assert!(stderr(&output).contains("rank 1 (node 0) was ended by SIGSEGV"), "{}", stderr(&output));
}

#[test]
fn after_a_failure_the_others_may_end_by_themselves() {
    // Rank 0 waits for the end of its launcher pipe as a rank waits for its peers, and ends only by
    // the signal of rank 1.
    let script = r#"
        if [ $RANK = 0 ]; then
            trap 'echo said why; exit 0' USR1
            echo $$ > "$PIPE"
            read x <&$SIDELANE_LAUNCHER_FD
        fi
        read pid < "$PIPE"; kill -USR1 $pid; exit 9"#;
    let pipe = std::env::temp_dir().join(format!("sidelane-launch-{}", std::process::id()));
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let output =
        launch(&["--ranks-per-node", "2", "--grace", "600"], script).env("PIPE", &pipe).output().unwrap();
    std::fs::remove_file(&pipe).unwrap();
    assert_eq!(output.status.code(), Some(9), "{}", stderr(&output));
    assert_eq!(lines(&output.stdout), ["said why".to_owned()].into());
    assert!(!stderr(&output).contains("killed rank"), "{}", stderr(&output));
}

#[test]
fn ranks_that_do_not_end_in_time_are_killed_and_named() {
    let output = run(
        &["--ranks-per-node", "3", "--grace", "0"],
        "[ $RANK != 1 ] || exit 4; read x <&$SIDELANE_LAUNCHER_FD",
    );
    assert_eq!(output.status.code(), Some(4));
    assert!(stderr(&output).contains("killed ranks 0 and 2"), "{}", stderr(&output));
    assert!(stderr(&output).contains(" (--grace)\n"), "{}", stderr(&output));
}

#[test]
fn a_signal_reaches_every_rank_once() {
    // A signal just before a shell blocks in `read` would wait for its end.
    let script = "trap 'echo told; exit 0' TERM; echo ready; while :; do sleep 0.01; done";
    let (mut launcher, out) = launch_until_ready(&["--ranks-per-node", "3"], script, 3);
    rustix::process::kill_process(rustix::process::Pid::from_child(&launcher), rustix::process::Signal::TERM)
        .unwrap();
    assert_eq!(rest(out), "told\n".repeat(3));
    assert_eq!(launcher.wait().unwrap().code(), Some(128 + 15));
}

#[test]
fn the_death_of_the_launcher_ends_the_pipe_of_every_rank() {
    let script = "echo ready; read x <&$SIDELANE_LAUNCHER_FD; echo rank $RANK misses $SIDELANE_LAUNCHER_PID";
    let (mut launcher, out) = launch_until_ready(&["--ranks-per-node", "3"], script, 3);
    let pid = launcher.id();
    launcher.kill().unwrap();
    launcher.wait().unwrap();
    let expected = (0..3).map(|rank| format!("rank {rank} misses {pid}")).collect();
    assert_eq!(lines(rest(out).as_bytes()), expected);
}

/// A program that joins no world does not look at the pipe. Nor do children of one that has ended.
#[test]
fn killed_launcher_leaves_no_process_of_a_rank_behind() {
    for script in ["sleep 1000 & echo $! $$; wait", "sleep 1000 & echo $! $!; [ $RANK = 0 ] || wait"] {
        let mut launcher = launch(&["--ranks-per-node", "2", "--grace", "0"], script);
        let mut launcher = launcher.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let mut out = BufReader::new(launcher.stdout.take().unwrap());
        let mut left: Vec<_> = Vec::new();
        for _ in 0..2 {
            let mut line = String::new();
            out.read_line(&mut line).unwrap();
            for pid in line.split_whitespace() {
                let pid = rustix::process::Pid::from_raw(pid.parse().unwrap()).unwrap();
                left.push(rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).unwrap());
            }
        }
        assert_eq!(left.len(), 4);
        launcher.kill().unwrap();
        launcher.wait().unwrap();
        for process in left {
            let mut ended = [rustix::event::PollFd::new(&process, rustix::event::PollFlags::IN)];
            let patience = rustix::event::Timespec { tv_sec: 60, tv_nsec: 0 };
            assert_eq!(rustix::event::poll(&mut ended, Some(&patience)).unwrap(), 1, "it runs on");
        }
    }
}

#[test]
fn a_command_that_does_not_exist_is_named() {
    let output = Command::new(env!("CARGO_BIN_EXE_sidelane"))
        .args(["launch", "--ranks-per-node", "2", "--", "./no-such-program"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(127));
    assert!(stderr(&output).contains("rank 0") && stderr(&output).contains("./no-such-program"));
}

#[test]
fn a_wrong_shape_is_refused_before_anything_starts() {
    let output = run(&["--nodes", "3", "--ranks-per-node", "3,5"], "echo started");
    assert_eq!(output.status.code(), Some(2));
    assert!(output.stdout.is_empty());
    assert!(stderr(&output).contains("--nodes is 3"), "{}", stderr(&output));
}
