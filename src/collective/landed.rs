//! Elements of each rank for each, directly to their places.

use super::Communicator;
use super::call::{CallSpec, Tensors};
use crate::dtype::Element;
use crate::error::{CallKind, Error, MemoryError};
use crate::lane::Io;
use crate::schedule::collective::{Program, Round};
use crate::schedule::{PutSource, WindowId};

impl Communicator {
    /// Part `r` of `send` goes to rank `r`; part `s` of the result came from rank `s`. Both are
    /// `[ranks, n]`, with the same `n` on all ranks. Collective.
    ///
    /// Use it for large tensors: every rank writes its parts directly to the place where they are
    /// read, and each byte is copied once. This needs a second synchronization, so
    /// [`Communicator::all_to_all`] is faster for small ones. On one node of two cores the limit is
    /// 64 KiB with eight ranks, and 256 KiB with two.
    ///
    /// The result lies in this rank's window, which has room for one
    /// ([`CommunicatorBuilder::zero_copy_bytes`](super::CommunicatorBuilder::zero_copy_bytes)). It
    /// borrows the communicator: others may write there again when this rank makes its next call.
    ///
    /// ```
    /// # use sidelane::{World, collective::Communicator};
    /// # let ranks = World::threads(2)?.into_iter().map(|world| {
    /// #     std::thread::spawn(move || -> sidelane::Result<()> {
    /// let mut group = Communicator::builder(&world.all()?).zero_copy_bytes(1 << 10).build()?;
    /// let me = world.rank() as f32;
    /// let came = group.all_to_all_zero_copy(&[10.0 * me, 10.0 * me + 1.0])?;     // a part of one element for each of two ranks
    /// assert_eq!(came, [me, 10.0 + me]);
    /// #         Ok(())
    /// #     })
    /// # });
    /// # for rank in ranks.collect::<Vec<_>>() {
    /// #     rank.join().unwrap()?;
    /// # }
    /// # Ok::<(), sidelane::Error>(())
    /// ```
    ///
    /// So this does not compile:
    ///
    /// ```compile_fail,E0499
    /// # fn step(group: &mut sidelane::collective::Communicator) -> sidelane::Result<()> {
    /// let came = group.all_to_all_zero_copy(&[1.0f32, 2.0])?;
    /// group.all_reduce(&mut [0.0f32])?;
    /// println!("{came:?}");
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`];
    /// [`PlanError::WrongShape`](crate::error::PlanError::WrongShape) for a tensor that does not
    /// make equal parts. A tensor larger than the room gives [`MemoryError::OutOfSpace`] on all
    /// ranks, before anything moves.
    pub fn all_to_all_zero_copy<E: Element>(&mut self, send: &[E]) -> Result<&[E], Error> {
        let (total, ranks) = (size_of_val(send) as u64, u64::from(self.size()));
        let (program, dtype) = (Program::ZeroCopy, E::DTYPE);
        let call = CallSpec { kind: CallKind::AllToAll, dtype, option: 2, bytes: Some(total) };
        let fits = self.equal_parts(send.len()).map_err(Error::from).and_then(|_| self.fits(total));
        if let Err(error) = fits {
            return Err(self.enter_refused(call, program, error));
        }
        let (part, stores) = (total / ranks, self.stores(total));
        let round = Round { program, len: part, ..Self::empty(dtype) };
        self.round(
            call,
            &round,
            &mut Tensors { input: Some(bytemuck::cast_slice(send)), output: &mut [], stores },
        )?;
        let (at, window) = (self.seat.landed(part).start, WindowId::POOL);
        let own = PutSource::Window { owner: self.seat.me, window };
        Ok(bytemuck::cast_slice(self.port.source(own, at, Some(total), &Io::default())?))
    }

    fn fits(&self, bytes: u64) -> Result<(), Error> {
        let (room, rank) = (self.seat.staging.room(), self.seat.me);
        if bytes <= room {
            return Ok(());
        }
        let (space, setting) = ("landing", "landing");
        Err(MemoryError::OutOfSpace { rank, asked: bytes, free: room, total: room, space, setting }.into())
    }
}
