//! Capture: nothing runs until a launch, constants stay, what cannot be captured is refused.

use std::thread;

use sys::CUgraphNodeType as Node;
use sys::CUstreamCaptureMode::{
    self as Mode, CU_STREAM_CAPTURE_MODE_GLOBAL as GLOBAL, CU_STREAM_CAPTURE_MODE_RELAXED as RELAXED,
};

use crate::common::*;
use crate::{cu, ok};

fn begin(stream: sys::CUstream, mode: Mode) {
    ok!(cuStreamBeginCapture_v2(stream, mode));
}

fn end(stream: sys::CUstream) -> Result<sys::CUgraph, CUresult> {
    let mut graph = std::ptr::null_mut();
    match cu!(cuStreamEndCapture(stream, &mut graph)) {
        CUresult::CUDA_SUCCESS => Ok(graph),
        code => Err(code),
    }
}

fn executable(graph: sys::CUgraph) -> sys::CUgraphExec {
    made(|out| ok!(cuGraphInstantiateWithFlags(out, graph, 0)))
}

#[test]
fn a_graph_runs_at_its_launches_with_the_same_constants() {
    apart("capture::a_graph_runs_at_its_launches_with_the_same_constants", &seeds(3), || {
        let fake_driver = start(0);
        let (from, source) = host_words(1);
        let (flag, to) = (device_words(1), device_words(1));
        fill_words(flag, 0, 1);
        let before = fake_driver.counters();
        let stream = stream();
        begin(stream, GLOBAL);
        ok!(cuMemcpyHtoDAsync_v2(to, from as *const _, 4, stream));
        ok!(cuStreamWriteValue32_v2(stream, flag, 1, 0));
        ok!(cuStreamWaitValue32_v2(stream, flag, 1, 0));
        ok!(cuStreamWriteValue32_v2(stream, flag, 0, 0));
        let graph = end(stream).unwrap();
        let count = made(|out| ok!(cuGraphGetNodes(graph, std::ptr::null_mut(), out)));
        let mut nodes = vec![std::ptr::null_mut(); count];
        ok!(cuGraphGetNodes(graph, nodes.as_mut_ptr(), &mut { count }));
        let kind = |node| made(|out: *mut Node| ok!(cuGraphNodeGetType(node, out)));
        assert_eq!(kind(nodes[0]), Node::CU_GRAPH_NODE_TYPE_MEMCPY);
        assert!(nodes[1..].iter().all(|&node| kind(node) == Node::CU_GRAPH_NODE_TYPE_BATCH_MEM_OP));
        assert_eq!(count, 4);
        let executable = executable(graph);
        ok!(cuStreamSynchronize(stream));
        assert_eq!(fake_driver.counters().copies, before.copies, "a capture runs nothing");
        for value in 10..13 {
            source[0] = value;
            ok!(cuGraphLaunch(executable, stream));
            ok!(cuStreamSynchronize(stream));
            assert_eq!((read_words(to, 1), read_words(flag, 1)), (vec![value], vec![0]));
        }
        let after = fake_driver.counters();
        assert_eq!((after.graphs, after.memory_operations - before.memory_operations), (3, 9));
    });
}

#[test]
fn branches_of_a_graph_run_in_the_order_of_their_events() {
    apart("capture::branches_of_a_graph_run_in_the_order_of_their_events", &seeds(3), || {
        start(0);
        let words = 1024;
        let (a, b, c) = (device_words(words), device_words(words), device_words(words));
        let (main, side) = (stream(), stream());
        let (fork, join) = (event(), event());
        begin(main, GLOBAL);
        ok!(cuMemcpyDtoDAsync_v2(b, a, words * 4, main));
        ok!(cuEventRecord(fork, main));
        ok!(cuStreamWaitEvent(side, fork, 0));
        ok!(cuMemcpyDtoDAsync_v2(c, b, words * 4, side));
        ok!(cuEventRecord(join, side));
        assert_eq!(cu!(cuEventQuery(join)), CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        assert_eq!(end(main), Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED));
        begin(main, GLOBAL);
        ok!(cuMemcpyDtoDAsync_v2(b, a, words * 4, main));
        ok!(cuEventRecord(fork, main));
        ok!(cuStreamWaitEvent(side, fork, 0));
        ok!(cuMemcpyDtoDAsync_v2(c, b, words * 4, side));
        ok!(cuEventRecord(join, side));
        ok!(cuStreamWaitEvent(main, join, 0));
        let executable = executable(end(main).unwrap());
        assert_eq!(cu!(cuEventQuery(join)), CUresult::CUDA_ERROR_CAPTURED_EVENT);
        for round in 1..50 {
            fill_words(a, round, words);
            ok!(cuGraphLaunch(executable, main));
            ok!(cuStreamSynchronize(main));
            assert_eq!(read_words(c, words), vec![round; words]);
        }
    });
}

#[test]
fn a_batch_of_copies_cannot_be_captured() {
    apart("capture::a_batch_of_copies_cannot_be_captured", &plainly(), || {
        start(0);
        let (a, b) = (device_words(1), device_words(1));
        let stream = stream();
        begin(stream, GLOBAL);
        assert_eq!(batch(&[(b, a, 4)], BESIDE, stream), CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        let spoiled = CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
        assert_eq!(cu!(cuMemcpyDtoDAsync_v2(b, a, 4, stream)), spoiled);
        assert_eq!(end(stream), Err(spoiled));
        ok!(cuMemcpyDtoDAsync_v2(b, a, 4, stream));
        ok!(cuStreamSynchronize(stream));
    });
}

#[test]
fn captures_that_are_not_whole_are_refused() {
    apart("capture::captures_that_are_not_whole_are_refused", &plainly(), || {
        start(0);
        let word = device_words(1);
        let (main, side) = (stream(), stream());
        let (fork, outside) = (event(), event());
        ok!(cuEventRecord(outside, side));
        begin(main, RELAXED);
        ok!(cuEventRecord(fork, main));
        ok!(cuStreamWaitEvent(side, fork, 0));
        ok!(cuStreamWriteValue32_v2(side, word, 1, 0));
        assert_eq!(end(main), Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNJOINED));
        begin(main, RELAXED);
        assert_eq!(cu!(cuStreamWaitEvent(main, outside, 0)), CUresult::CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
        assert_eq!(end(main), Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED));
        begin(main, RELAXED);
        assert_eq!(cu!(cuStreamSynchronize(main)), CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        assert_eq!(end(main), Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED));
        assert_eq!(end(main), Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNMATCHED));
    });
}

#[test]
fn a_global_capture_forbids_unsafe_calls_to_all_threads() {
    apart("capture::a_global_capture_forbids_unsafe_calls_to_all_threads", &plainly(), || {
        start(0);
        let capturing = stream();
        let elsewhere = |mode: Mode| {
            let other = thread::spawn(move || {
                use_device(0);
                ok!(cuThreadExchangeStreamCaptureMode(&mut { mode }));
                (cu!(cuStreamQuery(stream())), cu!(cuMemAlloc_v2(&mut 0, 4)))
            });
            other.join().unwrap()
        };
        let forbidden = CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        let fine = CUresult::CUDA_SUCCESS;
        begin(capturing, GLOBAL);
        assert_eq!(elsewhere(GLOBAL), (forbidden, forbidden));
        assert_eq!(end(capturing), Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED));
        begin(capturing, GLOBAL);
        assert_eq!(elsewhere(RELAXED), (fine, fine));
        end(capturing).unwrap();
        begin(capturing, RELAXED);
        assert_eq!(elsewhere(GLOBAL), (fine, fine));
        end(capturing).unwrap();
    });
}
