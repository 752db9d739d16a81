//! Command lines that no command accepts: refused with status 2 and a reason, before any process is
//! started.

use crate::program::{run, sidelane};

/// A command line, and words of the reason.
const REFUSED: &[(&str, &[&str])] = &[
    ("bench --route relay", &["direct", "pxn"]),
    ("bench --layout token-major", &["expert-major", "rank-major"]),
    ("bench --mode static", &["exact", "budget", "slots"]),
    ("bench --on-overflow wait", &["drop", "error"]),
    ("bench --sum-order token", &["expert", "rank", "node"]),
    ("bench --partial-dtype f16", &["f32", "bf16"]),
    ("bench --dtype bytes", &["bf16", "f16", "f32", "fp8"]),
    ("bench --routing zipf:x", &["uniform", "incast", "zipf:S"]),
    ("bench --routing unifrom", &["\"unifrom\" is neither recorded, uniform, zipf:S or incast, nor a file"]),
    (
        "bench --routing recorded --experts 32",
        &["routing recorded: num_experts is 64 in the recording, but 32 was asked for"],
    ),
    ("bench --coalesce-relays", &["--coalesce-relays is for --layout rank-major --route pxn"]),
    (
        "bench --coalesce-relays --layout rank-major --route direct",
        &["--coalesce-relays is for --layout rank-major --route pxn"],
    ),
    (
        "bench --sum-order rank --partial-dtype bf16 --dtype f16",
        &["--partial-dtype bf16 is for rows of bf16, and these are f16"],
    ),
    (
        "bench --partial-dtype f32",
        &["--partial-dtype has no effect here: it is for --sum-order rank or node"],
    ),
    ("trace --out t.json --sum-order expert --partial-dtype bf16", &["--partial-dtype has no effect here"]),
    ("trace --out t.json --top-k 9 --experts 8", &["--top-k is 9"]),
    ("bench --hidden 7", &["a row of 7 x bf16 has 14 bytes: it must be a multiple of 16"]),
    ("bench --experts 4", &["--top-k is 8, but there are only 4 experts"]),
    ("bench --nodes 3 --ranks-per-node 1,2", &["--ranks-per-node lists 2 nodes, but --nodes is 3"]),
    ("bench --tokens 0", &["--tokens must be at least 1"]),
    ("bench --hidden 0", &["--hidden must be at least 1"]),
    ("bench --experts 0", &["--experts must be at least 1"]),
    ("bench --top-k 0", &["--top-k must be at least 1"]),
    ("bench --align 0", &["--align must be at least 1"]),
    ("bench --rounds 0", &["--rounds must be at least 1"]),
    (
        "bench --tokens 16 --routing incast --mode budget --budget 1",
        &["128 rows", "rank 0 needs 1024", "--budget 8 has room"],
    ),
    ("bench --tokens 16 --routing incast --mode slots --slots 15", &["--slots 16 has room"]),
    ("bench --budget 2", &["--budget is for --mode budget"]),
    ("bench --slots 2", &["--slots is for --mode slots"]),
    ("bench --on-overflow drop", &["--on-overflow is for --mode budget or slots"]),
    ("bench --mode slots --budget 2", &["--budget is for --mode budget"]),
    ("bench --mode budget --budget -1", &["--budget -1 is not a positive number"]),
    ("bench --chained --dtype fp8", &["--dtype fp8 is not for --chained"]),
    ("bench --collectivex case.json", &["--chained"]),
    ("bench --chained --collectivex case.json --dtype f32", &["--dtype is not for --collectivex"]),
    ("bench --chained --collectivex case.json --ranks-per-node 1,2", &["--ranks-per-node is not for"]),
    (
        "bench --chained --collectivex case.json --mode slots --on-overflow drop",
        &["--on-overflow drop is not for --collectivex"],
    ),
    ("bench --chained --collectivex same.json --json same.json", &["is given for two files"]),
    (
        "bench --nodes 1 --ranks-per-node 2 --net tcp",
        &["--net has no effect here: all ranks are on one node"],
    ),
    ("conformance --only foo", &["no feature of the table: conformance --help lists the names"]),
    ("launch --nodes 0 --ranks-per-node 4 -- true", &["--nodes must be at least 1"]),
    ("launch --ranks-per-node 4,0 -- true", &["--ranks-per-node must be at least 1"]),
    ("launch --nodes 4294967295 --ranks-per-node 4294967295 -- true", &["are too many: at most 65536"]),
    ("launch --ranks-per-node 4294967295,4294967295 -- true", &["are too many: at most 65536"]),
    ("layer --token-chunks 0", &["--token-chunks must be between 1 and 1024"]),
    ("layer --experts 3", &["--top-k is 4, but there are only 3 experts"]),
    ("layer --experts 1 --top-k 1", &["1 experts are too few: each of 2 ranks has one at least"]),
    (
        "layer --net tcp --link 1G/10",
        &["--link is for wires between nodes of one machine, over --net loopback"],
    ),
    (
        "launch --master a:99999 --node-rank 0 --ranks-per-node 1 -- true",
        &["HOST:PORT has a port from 1 to 65535"],
    ),
    ("collectives --ranks-per-node 3 --sizes 4K", &["take multiples of 48, such as 4128"]),
    ("plan --tokens 5", &["--tokens is 5, less than one sequence of 4096"]),
    ("plan --tokens 16 --sequence 8 --devices 64", &["one token for each of 64 devices"]),
    (
        "layer --hidden 1048576 --ffn 1048576",
        &["weights of a rank's --experts must be between 1 and 2147483648"],
    ),
    (
        "layer --tokens 1048576 --hidden 4096",
        &["--tokens x --top-k x --hidden must be between 1 and 2147483648"],
    ),
    ("layer --tokens 8", &["--token-chunks must be between 1 and 8"]),
    ("layer --token-chunks 4 --transfers 5", &["--transfers must be between 1 and 4"]),
    ("layer --hidden 12", &["rows of 12 x bf16 are no multiple of 16 bytes"]),
    ("layer --link fast", &["bytes per second"]),
    ("layer --nodes 0", &["--nodes must be at least 1"]),
    (
        "layer --nodes 1 --ranks-per-node 2 --link 1G/10",
        &["--link is for wires between nodes of one machine"],
    ),
    ("put-bench put-lat --nodes 1", &["a job of one rank has no pair"]),
    ("put-bench put-lat --nodes 1 --ranks-per-node 2 --pairs all", &["--pairs all is for two nodes or more"]),
    ("put-bench put-lat --peer 0", &["--peer is rank 0 itself"]),
    ("put-bench put-lat --peer 2", &["--peer is 2, but the job has 2 ranks, counted from 0"]),
    ("put-bench put-bw --baselines", &["--baselines is for put-lat between the ranks of one node"]),
    (
        "put-bench put-lat --baselines --ranks-per-node 1,1",
        &["--baselines is for put-lat between the ranks of one node"],
    ),
    ("put-bench put-lat --sizes 0", &["not 0"]),
    ("put-bench put-lat --sizes 8..soon", &["is no size"]),
    ("put-bench put-bw --pairs all --peer 1", &["cannot be used with"]),
    ("put-bench put-bw --node-rank 0", &["--master"]),
    ("put-bench latency", &["put-lat"]),
    ("put-bench put-lat --iterations 0", &["--iterations must be at least 1"]),
    (
        "put-bench put-bw --sizes 2G",
        &["--sizes <SIZE,..|FROM..TO>", "sizes are from 1 byte to 1G, not 2147483648"],
    ),
    (
        "collectives --sizes 2G",
        &["--sizes <SIZE,..|FROM..TO>", "sizes are from 1 byte to 1G, not 2147483648"],
    ),
    ("put-bench signal --sizes 8", &["--sizes means nothing for signal"]),
    ("put-bench signal --svg x", &["--svg means nothing for signal"]),
    ("put-bench put-lat --nodes 0", &["--nodes must be at least 1"]),
    ("plan-bench --ranks 12 --rounds 1", &["--ranks 12 is more than a node of 8, and no multiple of it"]),
    ("routing --tokens 0", &["--tokens must be at least 1"]),
    ("routing --experts 4 --top-k 5", &["top_k = 5"]),
    ("routing --top-k 65 --random", &["top_k = 65"]),
    ("routing --factors 0", &["capacity factor = 0"]),
    ("routing --factors=-1", &["capacity factor = -1"]),
    ("routing --factors 1,0", &["capacity factor = 0"]),
    ("routing /nowhere.jsonl", &["/nowhere.jsonl"]),
    ("routing --nodes 3 --ranks-per-node 3,5", &["--ranks-per-node lists 2 nodes"]),
    ("routing --random uniform", &["cannot be used with"]),
    ("simulate --nodes 0", &["--nodes"]),
    ("simulate --nodes 4096", &["4096"]),
    ("simulate --experts 0", &["--experts"]),
    ("simulate --experts 2000000", &["--experts"]),
    ("simulate --hardware abacus", &["h100-cx7"]),
    (
        "simulate --token-chunks 2 --tensor-ffn 100",
        &["--tensor-ffn 100 is cut over the ranks of a node: 8 do not divide it"],
    ),
    ("simulate --tensor-ffn 64", &["--token-chunks"]),
    ("simulate --mode slots", &["--nodes 1"]),
    ("simulate --mode slots --nodes 1 --svg unwritten.svg", &["--svg"]),
    ("simulate --mode slots --nodes 1 --layout rank-major", &["--layout"]),
    ("simulate --mode slots --nodes 1 --metadata-with rows", &["--metadata-with"]),
    ("simulate --mode slots --nodes 1 --routing uniform", &["--routing"]),
    ("simulate --hidden 7 --tokens 1", &["a multiple of 16"]),
    ("simulate --route relay", &["pxn"]),
    ("simulate --model gpt", &["deepseek-v3"]),
    ("simulate --relay-parts 0", &["--relay-parts"]),
    ("simulate --tflops 300", &["--token-chunks"]),
    ("simulate --tokens 16 --token-chunks 1,17", &["--token-chunks"]),
    ("simulate --nodes 1 --partial-dtype f32", &["--partial-dtype"]),
    ("simulate --sum-order expert --partial-dtype bf16", &["--partial-dtype"]),
    ("simulate --route direct --relay-parts 4", &["--relay-parts"]),
    ("simulate --tokens 1048576 --experts 16384", &["--tokens x --experts"]),
    ("simulate --tokens 1048576 --top-k 8 --nodes 512 --all-ranks", &["--top-k of all ranks"]),
    ("plan --model gpt", &["deepseek-v3", "nor a file that can be read"]),
    ("plan --hardware abacus", &["h100-cx7"]),
    ("plan --devices 0", &["--devices"]),
    ("plan --devices 1000000", &["--devices"]),
    ("plan --tokens 0", &["tokens = 0"]),
    ("plan --tokens 4X", &["--tokens", "is no number"]),
    ("plan --sequence 0", &["sequence = 0"]),
    ("plan --overlap some", &["data"]),
    ("plan --tp 3", &["make no mesh for deepseek-v3: tp = 3 does not divide devices = 256"]),
    ("plan --devices 8", &["fits no mesh of 8 devices", "of 80.0 GB a device"]),
    ("plan-bench --top-k 300", &["--top-k"]),
    (
        "simulate --ranks-per-node 2 --tokens 32 --mode slots --nodes 1 --token-chunks 2",
        &["whose copies take no core"],
    ),
    ("copy-engines --tokens 0", &["--tokens"]),
    ("copy-engines --copy-gbps 0", &["above 0"]),
    ("copy-engines --hidden 7 --nodes 1", &["a multiple of 16"]),
    ("copy-engines /nowhere/routing.jsonl", &["/nowhere/routing.jsonl"]),
];

/// Sizes that no machine has the memory for: the kernel would kill the process, or a rank.
const TOO_LARGE: &[(&str, &str)] = &[
    ("bench --tokens 4294967295", "--tokens"),
    ("bench --tokens 4294967295 --routing uniform --mode budget --budget 1", "--tokens"),
    ("bench --tokens 16 --align 4294967295 --experts 65536 --top-k 1", "--align"),
    ("bench --tokens 16 --mode slots --slots 4294967295", "--slots"),
    ("bench --tokens 4096 --hidden 4294967280", "--hidden"),
    ("trace --out t.json --tokens 4294967295", "--tokens"),
    ("trace --out t.json --tokens 4096 --hidden 4294967280", "--hidden"),
    ("layer --tokens 1048576 --ranks-per-node 64 --experts 128", "--tokens"),
    ("routing --tokens 4294967295", "--tokens"),
    ("routing --random --tokens 4294967295", "--tokens"),
    ("copy-engines --tokens 4294967295", "--tokens"),
    ("copy-engines --nodes 1 --tokens 4294967295 --top-k 2", "--tokens"),
];

#[test]
fn sizes_beyond_machine_memory_are_refused_before_allocation() {
    for (line, option) in TOO_LARGE {
        assert_refused(line, &["of memory, and ", " are available: lower ", option]);
    }
}

fn assert_refused(line: &str, words: &[&str]) {
    println!("{line}");
    run(&mut sidelane(line)).refused(words);
}

#[test]
fn variable_that_ranks_cannot_use_is_refused_once() {
    for (name, value) in [
        ("SIDELANE_NET", "foo"),
        ("SIDELANE_HEAP", "12x"),
        ("SIDELANE_SIMD", "avx9"),
        ("SIDELANE_DEADLINE_MS", "abc"),
        ("SIDELANE_RAIL", "tcp"),
    ] {
        let ended = run(sidelane("bench --tokens 8").env(name, value));
        ended.refused(&[name]);
        assert_eq!(ended.err.lines().count(), 1, "{}", ended.err);
    }
}

#[test]
fn heap_of_the_environment_is_named_where_it_is_too_large() {
    let ended = run(sidelane("bench --tokens 8").env("SIDELANE_HEAP", "999G"));
    ended.refused(&["available: lower SIDELANE_HEAP, --tokens"]);
}

#[test]
fn ranks_of_other_machines_are_told_the_ports_that_are_listened_at() {
    let line = "launch --ranks-per-node 1,1 --master 192.0.2.2 --node-rank 1 -- true";
    let mut command = sidelane(line);
    for name in ["SECRET", "SECRET_FILE", "INSECURE", "PORT"] {
        command.env_remove(format!("SIDELANE_{name}"));
    }
    run(&mut command).refused(&["join at 192.0.2.2, ports 29501 to 29516: set the same SIDELANE_SECRET"]);
    run(command.env("SIDELANE_PORT", "7000")).refused(&["join at 192.0.2.2, port 7000: set"]);
}

#[test]
fn impossible_command_lines_are_refused_with_a_reason() {
    for (line, words) in REFUSED {
        assert_refused(line, words);
    }
}

#[test]
fn options_that_contradict_the_routing_file_are_refused() {
    let path = std::env::temp_dir().join(format!("sidelane-refusals-{}.jsonl", std::process::id()));
    let file = path.display();
    let token = "{\"topk_ids\":[3,0],\"topk_weights\":[0.5,0.5]}\n";
    std::fs::write(&path, format!("{{\"type\":\"meta\",\"num_experts\":4,\"top_k\":2}}\n{token}")).unwrap();
    assert_refused(&format!("bench --routing {file} --experts 64"), &["num_experts"]);
    assert_refused(&format!("bench --routing {file} --top-k 8"), &["top_k"]);
    std::fs::write(&path, token).unwrap();
    assert_refused(&format!("bench --routing {file} --experts 3"), &["line 1: expert 3 is out of range"]);
    std::fs::remove_file(path).unwrap();
}
