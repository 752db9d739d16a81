//! Rows that experts read, outputs that they write, and tokens that NICs read in place: one face
//! over both places.

use super::device::{EnqueuedOutput, EnqueuedRows, EnqueuedTokens};
use super::host::{HostInput, HostOutput, HostRows, elements};
use super::tensor::{Side, Tensor, wrong_place};
use super::{RowIndex, Strided};
use crate::device::DeviceRange;
use crate::dtype::Element;
use crate::ep::device::slots::{ExpandedRows, SlotOutput, SlotRows};
use crate::error::{CallError, Error};
use crate::memory::Extent;
use crate::plan::SlotShape;

/// Received rows, `[rows, hidden]`: expert-major (local expert, source rank, token), rank-major
/// (source rank, token), in [coalesce_relays](super::ExpertParallelBuilder::coalesce_relays) as the
/// [`index`](ExpertRows::index) says. Pad rows are zero, and on the host unused slots, too.
///
/// Their memory is given back when this is dropped: on a device, to calls that are enqueued later.
#[derive(Debug)]
pub struct ExpertRows(pub(super) RowsAt);

#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "calls allocate nothing")]
pub(super) enum RowsAt {
    Host(HostRows),
    Enqueued(EnqueuedRows),
    Slots(SlotRows),
}

/// Expert-major rows on a device.
enum OnDevice<'a> {
    Enqueued(&'a EnqueuedRows),
    Expanded(&'a ExpandedRows),
}

impl ExpertRows {
    /// Number of rows, pads and unused slots counted; the budget where sizes stay on the device.
    pub fn len(&self) -> u32 {
        match &self.0 {
            RowsAt::Host(rows) => rows.rows,
            RowsAt::Enqueued(rows) => rows.len(),
            RowsAt::Slots(rows) => rows.len(),
        }
    }

    /// Whether there is no row.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The rows on the host, `[len, hidden]`.
    ///
    /// # Errors
    /// [`PlanError::WrongPlace`](crate::error::PlanError) for rows on a device.
    pub fn rows<E: Element>(&self) -> Result<&[E], Error> {
        Ok(self.host()?.rows()?)
    }

    /// The rows on the host, to change in place.
    ///
    /// # Errors
    /// As [`ExpertRows::rows`].
    pub fn rows_mut<E: Element>(&mut self) -> Result<&mut [E], Error> {
        match &mut self.0 {
            RowsAt::Host(rows) => Ok(rows.rows_mut()?),
            _ => Err(wrong_place("received rows", Side::Host)),
        }
    }

    /// A copy on the host, which frees the pool's memory at once.
    ///
    /// # Errors
    /// As [`ExpertRows::rows`].
    pub fn to_vec<E: Element>(&self) -> Result<Vec<E>, Error> {
        self.rows::<E>().map(<[E]>::to_vec)
    }

    /// Host: where rows lie, if relays copied them in spans; else they lie in visible order. What
    /// goes with the rows, and what is combined along their handle, lies as they do.
    pub fn index(&self) -> Option<&RowIndex> {
        self.host().ok()?.index.as_deref()
    }

    /// Device: the rows, `[len, hidden]`; those beyond the segments are undefined. Of a dispatch in
    /// fp8, `[len, record]` in bytes, as [`Fp8RowShape`](crate::dtype::Fp8RowShape) says. In fixed
    /// slots, a slot of [`slots`](ExpertRows::slots) from each rank: `[ranks * slot_rows, hidden]`,
    /// in which the first `header_rows` of each slot are its header.
    ///
    /// They are there for what is enqueued on the instance's stream after the dispatch.
    ///
    /// # Errors
    /// [`PlanError::WrongPlace`](crate::error::PlanError) for rows on the host.
    pub fn range(&self) -> Result<DeviceRange, Error> {
        match &self.0 {
            RowsAt::Host(_) => Err(wrong_place("received rows", Side::Device)),
            RowsAt::Enqueued(rows) => rows.rows(),
            RowsAt::Slots(rows) => {
                Ok(rows.expanded.as_ref().map_or(&rows.received, |made| &made.rows).clone())
            }
        }
    }

    /// Device: routing weight of each row, `f32 [len]`; 0 for pad rows. Rank-major, of each row and
    /// choice, `f32 [len, top_k]`; 0 where another rank has the choice.
    ///
    /// # Errors
    /// As [`ExpertRows::range`]; [`CallError::NotKept`] in fixed slots, whose headers have the
    /// weights.
    pub fn weights(&self) -> Result<DeviceRange, Error> {
        match self.on_device("row weights")? {
            OnDevice::Enqueued(rows) => rows.weights(),
            OnDevice::Expanded(rows) => Ok(rows.weights.clone()),
        }
    }

    /// Device, rank-major without graphs: the local expert of each row and choice,
    /// `i32 [len, top_k]`; -1 where there is none.
    ///
    /// # Errors
    /// As [`ExpertRows::weights`]; [`CallError::NotKept`] for expert-major rows.
    pub fn experts(&self) -> Result<&DeviceRange, Error> {
        let missing = "experts of rows";
        match self.on_device(missing)? {
            OnDevice::Enqueued(rows) => Ok(rows.experts().ok_or(CallError::NotKept { missing })?),
            OnDevice::Expanded(_) => Err(CallError::NotKept { missing }.into()),
        }
    }

    /// Device: rows of each local expert, then the same with pads: `i64 [2, local experts]`.
    /// Rank-major, rows that chose each local expert, `i64 [local experts]`.
    ///
    /// # Errors
    /// As [`ExpertRows::weights`].
    pub fn counts(&self) -> Result<DeviceRange, Error> {
        Ok(match self.on_device("counts")? {
            OnDevice::Enqueued(rows) => rows.counts(),
            OnDevice::Expanded(rows) => &rows.counts,
        }
        .clone())
    }

    /// Device, where copy engines relay: rows as they arrived, and for each visible row which of
    /// them it is, `i32 [len]`, -1 for pads. A grouped matrix product that takes an index can read
    /// them as they are.
    pub fn arrivals(&self) -> Option<(&DeviceRange, &DeviceRange)> {
        match &self.0 {
            RowsAt::Enqueued(rows) => rows.index(),
            _ => None,
        }
    }

    /// Device, fixed slots: where things lie in a slot.
    #[doc(hidden)]
    pub fn slots(&self) -> Option<SlotShape> {
        match &self.0 {
            RowsAt::Slots(rows) if rows.expanded.is_none() => Some(rows.shape),
            _ => None,
        }
    }

    /// In fp8: the values of each row, `[len, hidden]`, one every
    /// [`Fp8RowShape::bytes`](crate::dtype::Fp8RowShape::bytes).
    ///
    /// # Errors
    /// As [`ExpertRows::rows`].
    pub fn payload(&self) -> Result<Option<Strided<'_, u8>>, Error> {
        Ok(self.host()?.payload()?)
    }

    /// In fp8: the scales of each row, one every
    /// [`Fp8RowShape::bytes`](crate::dtype::Fp8RowShape::bytes).
    ///
    /// # Errors
    /// As [`ExpertRows::rows`].
    pub fn scales(&self) -> Result<Option<Strided<'_, f32>>, Error> {
        Ok(self.host()?.scales()?)
    }

    pub(super) fn host(&self) -> Result<&HostRows, Error> {
        match &self.0 {
            RowsAt::Host(rows) => Ok(rows),
            _ => Err(wrong_place("received rows", Side::Host)),
        }
    }

    /// Rows that have something beside them.
    fn on_device(&self, missing: &'static str) -> Result<OnDevice<'_>, Error> {
        match &self.0 {
            RowsAt::Enqueued(rows) => Ok(OnDevice::Enqueued(rows)),
            RowsAt::Slots(rows) => match &rows.expanded {
                Some(rows) => Ok(OnDevice::Expanded(rows)),
                None => Err(CallError::NotKept { missing }.into()),
            },
            RowsAt::Host(_) => Err(wrong_place(missing, Side::Device)),
        }
    }
}

/// Output buffer of the experts: one row per received row and, where a gradient asks for it, one
/// `f32` per row behind them.
///
/// It lies where peers can read it, so combine copies nothing.
#[derive(Debug)]
pub struct ExpertOutput(pub(super) OutputAt);

#[derive(Debug)]
pub(super) enum OutputAt {
    Host(HostOutput),
    Enqueued(EnqueuedOutput),
    Slots(SlotOutput),
}

impl ExpertOutput {
    /// Number of rows, pads counted. What pad rows hold is never read.
    pub fn len(&self) -> u32 {
        match &self.0 {
            OutputAt::Host(output) => output.chunk.rows,
            OutputAt::Enqueued(output) => output.len(),
            OutputAt::Slots(output) => output.len(),
        }
    }

    /// Whether there is no row.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The rows on the host, `[len, hidden]`, to write to.
    ///
    /// # Errors
    /// [`PlanError::WrongPlace`](crate::error::PlanError) for a buffer on a device.
    pub fn rows_mut<E: Element>(&mut self) -> Result<&mut [E], Error> {
        Ok(self.host_mut()?.rows_mut()?)
    }

    /// On the host, one `f32` per row or, rank-major, per row and choice, to write to.
    ///
    /// # Errors
    /// As [`ExpertOutput::rows_mut`].
    pub fn weights_mut(&mut self) -> Result<&mut [f32], Error> {
        Ok(self.host_mut()?.weights_mut()?)
    }

    /// On a device, one `f32` per row or, rank-major, per row and choice, to write to: gradients of
    /// row weights.
    ///
    /// # Errors
    /// As [`ExpertOutput::range`]; [`CallError::NotKept`] in fixed slots.
    pub fn weights(&self) -> Result<DeviceRange, Error> {
        match &self.0 {
            OutputAt::Host(_) => Err(wrong_place("an output buffer", Side::Device)),
            OutputAt::Enqueued(output) => output.weights(),
            OutputAt::Slots(_) => Err(CallError::NotKept { missing: "row weights" }.into()),
        }
    }

    /// The rows on a device, `[len, hidden]`, to write to. In fixed slots,
    /// `[ranks, max_tokens, hidden]`: row i of rank r is what this rank's experts make of row i of
    /// the slot of r, weighted and added up; rows that a slot does not use may be left as they are.
    ///
    /// # Errors
    /// [`PlanError::WrongPlace`](crate::error::PlanError) for a buffer on the host.
    pub fn range(&self) -> Result<&DeviceRange, Error> {
        match &self.0 {
            OutputAt::Host(_) => Err(wrong_place("an output buffer", Side::Device)),
            OutputAt::Enqueued(output) => Ok(output.rows()),
            OutputAt::Slots(output) => Ok(&output.rows),
        }
    }

    pub(super) fn host(&self) -> Result<&HostOutput, Error> {
        match &self.0 {
            OutputAt::Host(output) => Ok(output),
            _ => Err(wrong_place("an output buffer", Side::Host)),
        }
    }

    fn host_mut(&mut self) -> Result<&mut HostOutput, Error> {
        match &mut self.0 {
            OutputAt::Host(output) => Ok(output),
            _ => Err(wrong_place("an output buffer", Side::Host)),
        }
    }
}

/// Rows that a rank brings into a combine or a gradient: the output buffer of a handle, or any
/// tensor, which is copied once.
#[derive(Debug)]
#[non_exhaustive]
pub enum CombineInput<'a> {
    /// The buffer of [`Handle::output`](super::Handle::output): nothing is copied.
    Output(ExpertOutput),
    /// Rows elsewhere in the place of the instance: copied into a buffer first, and counted in
    /// [`Handle::copied_bytes`](super::Handle::copied_bytes).
    Elsewhere(Tensor<'a>),
}

impl<'a> CombineInput<'a> {
    /// As an instance on the host takes it.
    pub(super) fn on_host(self) -> Result<HostInput<'a>, Error> {
        match self {
            CombineInput::Output(ExpertOutput(OutputAt::Host(output))) => Ok(HostInput::Output(output)),
            CombineInput::Output(_) => Err(wrong_place("expert outputs", Side::Host)),
            CombineInput::Elsewhere(tensor) => {
                let (bytes, dtype) = tensor.on_host("expert outputs")?;
                Ok(HostInput::Elsewhere { bytes, dtype })
            }
        }
    }
}

impl From<ExpertOutput> for CombineInput<'_> {
    fn from(output: ExpertOutput) -> Self {
        CombineInput::Output(output)
    }
}

impl<'a, T: Into<Tensor<'a>>> From<T> for CombineInput<'a> {
    fn from(rows: T) -> Self {
        CombineInput::Elsewhere(rows.into())
    }
}

/// Rows to be dispatched, `[tokens, hidden]`, in registered memory: NICs read them where they lie,
/// while those of any other memory of the host are copied first. To ranks of the node it makes no
/// difference on the host.
///
/// On a device a kernel packs rows, since NICs and copy engines read runs. It need not where what
/// goes to each place is a run of tokens: where a sequence is cut into parts, or each token goes to
/// every rank. Then rows in a token buffer go to other ranks as they lie, and the report of the
/// dispatch names the kernel once, for the rank's own rows, or not at all. Until the second half of
/// the dispatch they stay as they are.
///
/// ```
/// # use sidelane::{World, gate::Routing};
/// # let world = World::threads(1)?.remove(0);
/// let mut ep = sidelane::ExpertParallel::builder(&world.all()?).experts(2).top_k(1).hidden(8).build()?;
/// let mut x = ep.token_buffer(3)?;
/// x.rows_mut::<half::bf16>()?.fill(half::bf16::ONE);
/// let (rows, _) = ep.dispatch(x.rows::<half::bf16>()?, &Routing::new(1, vec![0, 1, 1], vec![1.0; 3])?)?;
/// assert_eq!(rows.len(), 3);
/// # Ok::<(), sidelane::Error>(())
/// ```
#[derive(Debug)]
pub struct TokenBuffer {
    pub(super) at: TokensAt,
    pub(super) tokens: u32,
    pub(super) row_bytes: u64,
}

#[derive(Debug)]
pub(super) enum TokensAt {
    Host(Extent),
    Enqueued(EnqueuedTokens),
}

impl TokenBuffer {
    /// Number of tokens.
    pub fn len(&self) -> u32 {
        self.tokens
    }

    /// Whether there is no token.
    pub fn is_empty(&self) -> bool {
        self.tokens == 0
    }

    /// The rows on the host, `[len, hidden]`; of fp8, `[len, record]`.
    ///
    /// # Errors
    /// [`PlanError::WrongPlace`](crate::error::PlanError) for a buffer on a device.
    pub fn rows<E: Element>(&self) -> Result<&[E], Error> {
        match &self.at {
            TokensAt::Host(extent) => Ok(extent.slice(0, elements::<E>(self.tokens, self.row_bytes))?),
            TokensAt::Enqueued(_) => Err(wrong_place("a token buffer", Side::Host)),
        }
    }

    /// The rows on the host, to write to. Their contents are undefined at first.
    ///
    /// # Errors
    /// As [`TokenBuffer::rows`].
    pub fn rows_mut<E: Element>(&mut self) -> Result<&mut [E], Error> {
        match &mut self.at {
            TokensAt::Host(extent) => Ok(extent.slice_mut(0, elements::<E>(self.tokens, self.row_bytes))?),
            TokensAt::Enqueued(_) => Err(wrong_place("a token buffer", Side::Host)),
        }
    }

    /// The rows on a device, to write to. Their contents are undefined at first. Dropped, their
    /// memory is given back to calls that are enqueued later.
    ///
    /// # Errors
    /// [`PlanError::WrongPlace`](crate::error::PlanError) for a buffer on the host.
    pub fn range(&self) -> Result<&DeviceRange, Error> {
        match &self.at {
            TokensAt::Host(_) => Err(wrong_place("a token buffer", Side::Device)),
            TokensAt::Enqueued(tokens) => Ok(tokens.range()),
        }
    }
}
