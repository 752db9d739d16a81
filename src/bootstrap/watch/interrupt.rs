//! Ending the waits of one thread because its user asks for it.
//!
//! A program that embeds the library may learn of its user's interrupt (Ctrl-C) only by a check in
//! the waiting thread. So the thread registers its check, and long waits run it now and then:
//!
//! ```text
//!   interruptible(ask, || ep.dispatch(..))
//!        wait: pause, yield, sleep --ask()?--> sleep --ask()?--> true: the wait ends with LaneError::Interrupted
//! ```
//!
//! A collective call that ends this way ends the world, since its peers cannot continue;
//! [`Window::wait_until`](crate::Window::wait_until) may be called again. Threads without a check,
//! such as those of relays, run none.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// The longest time between two checks, besides the length of a sleep.
const EVERY: Duration = Duration::from_millis(20);

#[derive(Clone)]
struct InterruptCheck {
    ask: Rc<dyn Fn() -> bool>,
    asked: Instant,
}

thread_local! {
    static QUESTION: RefCell<Option<InterruptCheck>> = const { RefCell::new(None) };
}

/// Puts back the question of the caller's caller, whichever way the call ends.
struct Restore(Option<InterruptCheck>);

impl Drop for Restore {
    fn drop(&mut self) {
        QUESTION.replace(self.0.take());
    }
}

/// Runs a call whose waits in this thread end when `ask` requests it. Long waits call `ask` about
/// every 20 ms, short waits never.
pub fn interruptible<T>(ask: impl Fn() -> bool + 'static, call: impl FnOnce() -> T) -> T {
    let question = InterruptCheck { ask: Rc::new(ask), asked: Instant::now() };
    let _restore = Restore(QUESTION.replace(Some(question)));
    call()
}

/// Whether this thread has a check. Waits that do not poll must wake up now and then to run it.
pub(crate) fn has_interrupt_check() -> bool {
    QUESTION.with_borrow(Option::is_some)
}

/// Whether this thread's user wants to stop.
pub(crate) fn interrupted() -> bool {
    let due = QUESTION.with_borrow_mut(|question| {
        let question = question.as_mut()?;
        let now = Instant::now();
        let due = now.duration_since(question.asked) >= EVERY;
        due.then(|| {
            question.asked = now;
            Rc::clone(&question.ask)
        })
    });
    due.is_some_and(|ask| ask())
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    fn poll_until_interrupted() {
        while !interrupted() {
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_question_is_asked_until_it_says_yes_and_forgotten_with_its_call() {
        let asked = Rc::new(Cell::new(0));
        let count = Rc::clone(&asked);
        interruptible(
            move || {
                count.set(count.get() + 1);
                count.get() == 3
            },
            poll_until_interrupted,
        );
        assert_eq!(asked.get(), 3);
        assert!(!interrupted());
        assert_eq!(Rc::strong_count(&asked), 1);
    }

    #[test]
    fn of_nested_calls_the_inner_one_is_asked() {
        interruptible(
            || true,
            || {
                interruptible(|| false, || assert!(!interrupted()));
                poll_until_interrupted();
            },
        );
    }
}
