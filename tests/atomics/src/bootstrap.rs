//! What the pool asks of the world: that it lives, and to wait.

use std::convert::Infallible;
use std::marker::PhantomData;
use std::time::Duration;

use crate::error::Cause;

/// The health of a world that does not fail.
#[derive(Debug)]
pub(crate) struct Health;

impl Health {
    pub(crate) fn check(&self) -> Result<(), Cause> {
        Ok(())
    }
}

pub(crate) mod wait {
    use super::{Cause, Duration, Health, Infallible, PhantomData};

    /// No wait of a model ends early.
    #[allow(dead_code, reason = "the pool names all ends of a wait")]
    pub(crate) enum Ended {
        Failed(Cause),
        Late,
        Asked,
    }

    pub(crate) struct Polling<'a>(PhantomData<&'a Infallible>);

    impl<'a> Polling<'a> {
        pub(crate) fn within(_: &'a Health, _: Duration) -> Self {
            Polling(PhantomData)
        }

        pub(crate) fn turn(&mut self) -> Result<(), Ended> {
            loom::thread::yield_now();
            Ok(())
        }
    }
}
