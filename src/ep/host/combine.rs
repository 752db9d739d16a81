//! Combine: rows back to their tokens, summed.
//!
//! A *return* is what combine and the gradient of dispatch have in common: every rank offers a
//! chunk (rows, and one `f32` per row behind them); readers of the same node pull from it, the
//! parts for other nodes are put into staging there; then each rank sums in its own order.

use super::Target;
use super::buffers::{HostInput, check_tensor};
use super::exchange::{HostExchange, UnfinishedCall};
use super::flight::{Flight, Lent};
use super::handle::HostHandle;
use crate::error::{CallKind, Error};
use crate::lane::Io;
use crate::rows::Arithmetic;
use crate::schedule::ReturnParts;
use crate::schedule::call::CallMachine;

/// A combine between its halves.
#[derive(Debug)]
pub(in crate::ep) struct HostCombine<'a> {
    unfinished: UnfinishedCall<'a>,
    handle: Option<&'a HostHandle>,
    flight: Flight,
    machine: CallMachine,
}

impl HostExchange {
    /// A combine in one go.
    pub fn combine(
        &mut self,
        y: Result<HostInput<'_>, Error>,
        handle: Result<&HostHandle, Error>,
        out: Target<'_>,
    ) -> Result<(), Error> {
        let mut flight = self.combining();
        let output = self.sums(&mut flight, &handle, "combined tokens", out);
        let output = output.map(|output| Io { output, ..Io::default() });
        self.ret(&mut flight, y, handle, Lent { output, ..Lent::default() })
    }

    /// First half of a combine.
    pub fn start_combine<'a>(
        &'a mut self,
        y: Result<HostInput<'_>, Error>,
        handle: Result<&'a HostHandle, Error>,
    ) -> Result<HostCombine<'a>, Error> {
        let mut flight = Flight { offloaded: self.fixed.paths().rails(), ..self.combining() };
        let (rows, handle) = self.brought(&mut flight, y, handle);
        let machine = self.start(&mut flight, Lent { handle, rows, ..Lent::default() })?;
        Ok(HostCombine { unfinished: UnfinishedCall::new(self), handle, flight, machine })
    }

    /// A combine, as this instance makes it.
    pub fn combining(&self) -> Flight {
        let parts = ReturnParts { rows: true, weights: false };
        Flight::returning(CallKind::Combine, parts, self.fixed.spec.weighted)
    }

    /// Makes a return of what the caller brings.
    pub fn ret(
        &mut self,
        flight: &mut Flight,
        y: Result<HostInput<'_>, Error>,
        handle: Result<&HostHandle, Error>,
        lent: Lent<'_>,
    ) -> Result<(), Error> {
        let (rows, handle) = self.brought(flight, y, handle);
        self.make(flight, Lent { handle, rows, ..lent })
    }

    /// The tensor that sums go to; one that cannot be used refuses the call.
    pub fn sums<'o>(
        &self,
        flight: &mut Flight,
        handle: &Result<&HostHandle, Error>,
        what: &'static str,
        out: Target<'o>,
    ) -> Option<&'o mut [u8]> {
        let sent = (self.spec().hidden, self.spec().dtype);
        let tokens = handle.as_ref().map_or(0, |handle| handle.tokens());
        let (bytes, checked) = match out {
            // Without a handle nobody knows how many tokens there are, and the call is refused
            // anyway.
            Ok((bytes, _)) if handle.is_err() => (Some(bytes), Ok(())),
            Ok((bytes, dtype)) => {
                let checked = check_tensor(what, (&*bytes, dtype), tokens, sent);
                (Some(bytes), checked)
            }
            Err(error) => (None, Err(error)),
        };
        flight.refuse(checked);
        bytes
    }

    /// Rows and handle of a return, unless they are refused.
    fn brought<'y, 'h>(
        &self,
        flight: &mut Flight,
        y: Result<HostInput<'y>, Error>,
        handle: Result<&'h HostHandle, Error>,
    ) -> (Option<HostInput<'y>>, Option<&'h HostHandle>) {
        let handle = handle.map_err(|error| flight.refuse(Err(error))).ok();
        if let Some(handle) = handle {
            flight.refuse(self.check_handle(handle));
        }
        let rows = y.map_err(|error| flight.refuse(Err(error))).ok();
        flight.refuse(Arithmetic::try_from(self.spec().dtype).map(drop).map_err(Error::from));
        (rows, handle)
    }
}

impl HostCombine<'_> {
    /// Second half.
    pub fn finish(self, out: Target<'_>) -> Result<(), Error> {
        let HostCombine { mut unfinished, handle, mut flight, machine } = self;
        let ep = unfinished.finish();
        let sent = (ep.spec().hidden, ep.spec().dtype);
        let tokens = handle.map_or(0, HostHandle::tokens);
        // Too late to refuse the call: peers have this rank's entry.
        let out = out.and_then(|(bytes, dtype)| {
            check_tensor("combined tokens", (&*bytes, dtype), tokens, sent).map(|()| bytes)
        });
        let (output, checked) = match out {
            Ok(output) => (Some(Io { output, ..Io::default() }), Ok(())),
            Err(error) => (None, Err(error)),
        };
        ep.finish(machine, &mut flight, Lent { handle, output, ..Lent::default() })?;
        checked
    }
}
