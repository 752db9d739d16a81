//! Failures: the named node, the nodes that do not begin, and that no thread is left behind.

use std::ops::ControlFlow::{self, Break, Continue};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

use sidelane::bootstrap::{interruptible, panic_in};
use sidelane::error::{GateError, OverlapError};
use sidelane::overlap::{Graph, HostExecutor, NodeInfo, NodeLabel, Run, StreamId};
use sidelane::{Dtype, Error};

const COMPUTE: StreamId = StreamId::Compute(0);
const TRANSFER: StreamId = StreamId::Transfer(0);

fn work(name: &'static str, chunk: u32) -> NodeLabel {
    NodeLabel::new(name, chunk)
}

fn wrong() -> Error {
    GateError::NoArithmetic { dtype: Dtype::Bytes }.into()
}

/// A door that stays shut until a test opens it.
#[derive(Default)]
struct Door(Mutex<bool>, Condvar);

impl Door {
    fn open(&self) {
        *self.0.lock().unwrap() = true;
        self.1.notify_all();
    }

    fn pass(&self) {
        drop(self.1.wait_while(self.0.lock().unwrap(), |open| !*open).unwrap());
    }
}

/// Threads of runs that are there now, by the names of streams that no other test of this file has.
fn threads(names: &[&str]) -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().map(|task| task.unwrap().path());
    // One may end between the two looks.
    let named = tasks.filter_map(|task| std::fs::read_to_string(task.join("comm")).ok());
    named.filter(|name| names.contains(&name.trim())).count()
}

/// A node fails while another runs: that one is awaited, others do not begin, whether they wait for
/// it or not.
fn failing(
    executor: HostExecutor<'_>,
    fail: impl FnOnce() -> Result<(), Error> + Send,
) -> (OverlapError, [usize; 4]) {
    let (begun, there, hears) = ([const { AtomicUsize::new(0) }; 4], Door::default(), Door::default());
    let begin = |node: usize| begun[node].fetch_add(1, Ordering::SeqCst);
    let hook = |_: &OverlapError| {
        hears.open();
        Break(())
    };
    let mut graph = Graph::new();
    graph.add(TRANSFER, work("dispatch", 0), &[], |run: &Run| {
        begin(0);
        there.open();
        hears.pass();
        assert!(run.is_given_up());
        Ok(())
    });
    let fails = graph.add(COMPUTE, work("experts", 0), &[], |_| {
        begin(1);
        there.pass();
        fail()
    });
    graph.add(COMPUTE, work("experts", 1), &[], |_| {
        begin(2);
        Ok(())
    });
    graph.add(TRANSFER, work("combine", 0), &[fails], |_| {
        begin(3);
        Ok(())
    });
    let error = graph.run(&executor.on_error(&hook)).unwrap_err();
    (error, begun.map(AtomicUsize::into_inner))
}

#[test]
fn a_node_that_fails_is_named_and_no_other_begins() {
    let (error, begun) = failing(HostExecutor::new(), || Err(wrong()));
    let at = NodeInfo::new(work("experts", 0), COMPUTE);
    assert_eq!(error, OverlapError::Failed { at, error: Box::new(wrong()), not_begun: 2 });
    assert_eq!(begun, [1, 1, 0, 0]);
    assert!(error.to_string().starts_with("experts of chunk 0 on compute 0: "), "{error}");
}

#[test]
fn a_node_that_panics_is_named_with_what_it_said() {
    let (error, begun) = failing(HostExecutor::new(), || panic!("{} is too many", 7));
    let at = NodeInfo::new(work("experts", 0), COMPUTE);
    assert_eq!(error, OverlapError::Panicked { at, message: "7 is too many".into(), not_begun: 2 });
    assert_eq!(begun, [1, 1, 0, 0]);
}

#[test]
fn without_overlap_nothing_runs_behind_a_failure_either() {
    let mut begun = 0;
    let mut graph = Graph::new();
    graph.add(TRANSFER, work("dispatch", 0), &[], |_| Err(wrong()));
    graph.add(COMPUTE, work("experts", 0), &[], |_| {
        begun += 1;
        Ok(())
    });
    let at = NodeInfo::new(work("dispatch", 0), TRANSFER);
    let failed = OverlapError::Failed { at, error: Box::new(wrong()), not_begun: 1 };
    assert_eq!(graph.run(&HostExecutor::new().overlap(false)), Err(failed));
    assert_eq!(begun, 0);
}

#[test]
fn a_node_past_its_limit_is_named_while_it_is_at_it_and_returned_when_it_is_back() {
    for overlap in [true, false] {
        let (heard, late) = (Mutex::new(Vec::new()), Door::default());
        let limit = Duration::from_millis(20);
        // The late node ends by nothing but the hook.
        let hook = |error: &OverlapError| {
            heard.lock().unwrap().push(error.clone());
            late.open();
            Break(())
        };
        let mut graph = Graph::new();
        graph.add(TRANSFER, work("dispatch", 3), &[], |_| {
            late.pass();
            // What comes of having been late is not what went wrong.
            Err(wrong())
        });
        graph.add(TRANSFER, work("combine", 3), &[], |_| unreachable!("it is not begun"));
        let executor = HostExecutor::new().overlap(overlap).limit(limit).on_error(&hook);
        let Err(OverlapError::Overran { at, took, limit: allowed, not_begun }) = graph.run(&executor) else {
            panic!("it was late");
        };
        assert_eq!((at.work, at.stream, allowed, not_begun), (work("dispatch", 3), TRANSFER, limit, 1));
        let heard = heard.into_inner().unwrap();
        let [OverlapError::Overran { at: named, took: so_far, .. }] = heard.as_slice() else {
            panic!("once: {heard:?}");
        };
        assert_eq!(*named, at);
        assert!(limit <= *so_far && *so_far <= took, "{limit:?} {so_far:?} {took:?}");
    }
}

#[test]
fn who_is_late_after_another_who_was_no_end_is_named_too() {
    let limit = Duration::from_millis(20);
    let (heard, late) = (Mutex::new(Vec::new()), [Door::default(), Door::default()]);
    // Each ends by nothing but the hook.
    let hook = |error: &OverlapError| -> ControlFlow<()> {
        if let OverlapError::Overran { at, .. } = error {
            heard.lock().unwrap().push(at.work);
            late[at.work.chunk as usize].open();
        }
        Continue(())
    };
    let mut graph = Graph::new();
    for (chunk, stream) in [(0, TRANSFER), (1, COMPUTE)] {
        let late = &late[chunk as usize];
        graph.add(stream, work("late", chunk), &[], move |_| {
            late.pass();
            Ok(())
        });
    }
    let error = graph.run(&HostExecutor::new().limit(limit).on_error(&hook)).unwrap_err();
    assert!(matches!(error, OverlapError::Overran { .. }), "{error}");
    let mut heard = heard.into_inner().unwrap();
    heard.sort_by_key(|work| work.chunk);
    assert_eq!(heard, [work("late", 0), work("late", 1)]);
}

/// A transfer is refused, which does not end others, while `then` runs: the hook's error, and the
/// run's.
fn refused_beside(
    limit: Duration,
    then: impl FnOnce(&Run, &Door) -> Result<(), Error> + Send,
) -> ([OverlapError; 2], OverlapError) {
    let (heard, there, late) = (Mutex::new(Vec::new()), Door::default(), Door::default());
    let hook = |error: &OverlapError| -> ControlFlow<()> {
        heard.lock().unwrap().push(error.clone());
        if matches!(error, OverlapError::Failed { at, .. } if at.stream == TRANSFER) {
            return Continue(());
        }
        late.open();
        Break(())
    };
    let mut graph = Graph::new();
    graph.add(TRANSFER, work("dispatch", 1), &[], |_| {
        there.pass();
        Err(wrong())
    });
    graph.add(COMPUTE, work("experts", 0), &[], |run| {
        there.open();
        then(run, &late)
    });
    let error = graph.run(&HostExecutor::new().limit(limit).on_error(&hook)).unwrap_err();
    let heard = heard.into_inner().unwrap();
    (heard.try_into().expect("both are told, once"), error)
}

#[test]
fn nobody_begins_behind_half_of_a_node_that_fails_before_it() {
    let mut graph = Graph::new();
    let before = graph.add(TRANSFER, work("dispatch", 0), &[], |_| Err(wrong()));
    let never = |_: &Run| panic!("it was not agreed on");
    graph.add(StreamId::Transfer(1), work("dispatch", 1), &[before.halfway()], never);
    let error = graph.run(&HostExecutor::new()).unwrap_err();
    let OverlapError::Failed { at, not_begun: 1, .. } = error else { panic!("{error}") };
    assert_eq!(at, NodeInfo::new(work("dispatch", 0), TRANSFER));
}

#[test]
fn a_refusal_hides_nothing_worse_that_happens_beside_it() {
    let refused = |error: &OverlapError| matches!(error, OverlapError::Failed { at, .. } if at.work == work("dispatch", 1));
    let wait = |run: &Run| {
        while !run.is_given_up() {
            std::thread::yield_now();
        }
    };
    let ([first, second], error) = refused_beside(Duration::MAX, |run, _| {
        wait(run);
        panic!("bad luck")
    });
    assert!(refused(&first) && second == error, "{first} {second}");
    let at = NodeInfo::new(work("experts", 0), COMPUTE);
    assert_eq!(error, OverlapError::Panicked { at, message: "bad luck".into(), not_begun: 0 });

    // Only the hook ends it, which is called while it runs.
    let limit = Duration::from_secs(10);
    let ([first, second], error) = refused_beside(limit, |run, late| {
        wait(run);
        late.pass();
        Ok(())
    });
    assert!(refused(&first), "{first}");
    for error in [second, error] {
        assert!(matches!(error, OverlapError::Overran { at: seen, .. } if seen == at), "{error}");
    }
}

#[test]
fn a_node_that_is_back_late_was_late_whether_anybody_looked_or_not() {
    let limit = Duration::from_nanos(1);
    let mut graph = Graph::new();
    graph.add(COMPUTE, work("experts", 0), &[], |_| {
        let since = Instant::now();
        while since.elapsed() <= limit {}
        Ok(())
    });
    let error = graph.run(&HostExecutor::new().limit(limit)).unwrap_err();
    assert!(matches!(error, OverlapError::Overran { at, .. } if at.work == work("experts", 0)), "{error}");
}

#[test]
fn a_node_that_waits_for_another_graph_refuses_its_graph() {
    let mut other = Graph::new();
    let foreign = other.add(COMPUTE, work("elsewhere", 0), &[], |_| Ok(()));
    other.run(&HostExecutor::new()).unwrap();
    let mut graph = Graph::new();
    graph.add(COMPUTE, work("experts", 0), &[], |_| unreachable!("nothing is begun"));
    graph.add(TRANSFER, work("combine", 4), &[foreign], |_| unreachable!("nothing is begun"));
    let at = NodeInfo::new(work("combine", 4), TRANSFER);
    assert_eq!(graph.run(&HostExecutor::new()), Err(OverlapError::ForeignNode { at }));
}

#[test]
fn no_thread_is_left_behind() {
    let names = ["sidelane-comp77", "sidelane-move77", "sidelane-move78"];
    for fails in [false, true] {
        let (all, counted) = (std::sync::Barrier::new(3), AtomicUsize::new(0));
        let mut graph = Graph::new();
        graph.add(COMPUTE, work("nothing", 0), &[], |_| Ok(()));
        for stream in [StreamId::Compute(77), StreamId::Transfer(77), StreamId::Transfer(78)] {
            let (all, counted) = (&all, &counted);
            graph.add(stream, work("meet", 0), &[], move |_| {
                all.wait();
                if stream == StreamId::Compute(77) {
                    counted.store(threads(&names), Ordering::SeqCst);
                }
                all.wait();
                if fails { Err(wrong()) } else { Ok(()) }
            });
        }
        assert_eq!(graph.run(&HostExecutor::new()).is_err(), fails);
        assert_eq!(counted.into_inner(), 3, "they were there");
        // A thread that was joined may be in the list for a moment yet.
        let deadline = Instant::now() + Duration::from_secs(30);
        while threads(&names) > 0 {
            assert!(Instant::now() < deadline, "they are there still");
            std::thread::yield_now();
        }
    }
}

#[test]
fn a_caller_whose_user_has_had_enough_gives_up_while_it_waits() {
    // Once for a node of another stream, once for the end of the run.
    for waits in [true, false] {
        let (there, late) = (Door::default(), Door::default());
        let hook = |_: &OverlapError| {
            late.open();
            Break(())
        };
        let mut graph = Graph::new();
        let sent = graph.add(TRANSFER, work("dispatch", 0), &[], |_| {
            there.open();
            late.pass();
            Ok(())
        });
        graph.add(COMPUTE, work("attention", 0), &[], |_| {
            there.pass();
            Ok(())
        });
        if waits {
            graph.add(COMPUTE, work("experts", 0), &[sent], |_| unreachable!("it is not begun"));
        }
        let executor = HostExecutor::new().on_error(&hook);
        let run = interruptible(|| true, || graph.run(&executor));
        assert_eq!(run, Err(OverlapError::Interrupted { not_begun: usize::from(waits) }));
    }
}

#[test]
#[cfg_attr(not(debug_assertions), ignore = "threads obey orders to panic in builds with assertions alone")]
fn dead_thread_of_a_stream_ends_its_run_by_name() {
    panic_in("sidelane-move79");
    let mut graph = Graph::new();
    let dies = graph.add(StreamId::Transfer(79), work("dispatch", 0), &[], |_| Ok(()));
    graph.add(COMPUTE, work("experts", 0), &[dies], |_| unreachable!("its edge never ends"));
    let error = graph.run(&HostExecutor::new()).unwrap_err();
    let (name, message) = ("sidelane-move79".into(), "told to".into());
    assert_eq!(error, OverlapError::ThreadPanicked { name, message });
}

#[test]
fn hook_that_panics_ends_the_run_with_the_error_that_it_heard() {
    let mut graph = Graph::new();
    let fails = graph.add(TRANSFER, work("dispatch", 0), &[], |_| Err(wrong()));
    graph.add(COMPUTE, work("experts", 0), &[fails], |_| unreachable!("nothing begins"));
    let hook = |_: &OverlapError| panic!("bad luck");
    let error = graph.run(&HostExecutor::new().on_error(&hook)).unwrap_err();
    assert!(matches!(error, OverlapError::Failed { at, .. } if at.stream == TRANSFER), "{error}");
}
