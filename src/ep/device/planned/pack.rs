//! Packing: rows in the order of a layout, as they are sent.
//!
//! | brought | sent | kernel |
//! |---|---|---|
//! | rows | rows | `regroup` |
//! | records | records | `regroup` |
//! | rows | records (a dispatch in fp8) | `records_*` |

use super::common::Common;
use super::exchange::PlannedExchange;
use super::shape::StreamFlag;
use crate::device::{DeviceRange, Kernels, PermuteArgs, RecordArgs, Stream};
use crate::dtype::{Dtype, Fp8RowShape};
use crate::error::{CallKind, Error};

impl Common {
    /// Enqueues that `count` tokens of this type, which a call of this kind brings, are packed in
    /// the order of a seat.
    pub fn pack(
        &self,
        stream: &Stream,
        kernels: &Kernels,
        (kind, seat): (CallKind, u32),
        (count, x, dtype): (u32, &DeviceRange, Dtype),
    ) -> Result<(), Error> {
        let shape = &self.shape;
        let (order, packed) = (self.piece(shape.order(seat))?, self.piece(shape.staging())?);
        let (sources, rows) = (count, count * self.fixed.spec.top_k);
        let (from, index, out) =
            (x.span(0, x.len())?, order.span(0, order.len())?, packed.span(0, packed.len())?);
        let status = self.word(seat, StreamFlag::Status)?;
        let enqueued = match self.records(kind, dtype) {
            Some(record) => {
                let (hidden, index) = (record.hidden() as u32, Some(index));
                let records = RecordArgs { hidden, dtype, sources, rows, from, index, out, status };
                kernels.records(stream, &records)
            }
            None => {
                let row_bytes = shape.row_bytes(kind);
                let permute = PermuteArgs { row_bytes, sources, rows, from, index, out, status };
                kernels.regroup(stream, &permute)
            }
        };
        Ok(enqueued?)
    }

    /// Whether tokens of this type are sent as they are in a call of this kind.
    pub fn sends_as_they_are(&self, kind: CallKind, dtype: Dtype) -> bool {
        self.records(kind, dtype).is_none()
    }

    /// The kernel that does that.
    pub fn packs(&self, kind: CallKind, dtype: Dtype) -> &'static str {
        let records = self.records(kind, dtype).and_then(|_| Kernels::records_name(dtype).ok());
        records.unwrap_or("regroup")
    }

    /// The shape of the records that packing makes of tokens of this type, if it does.
    fn records(&self, kind: CallKind, dtype: Dtype) -> Option<Fp8RowShape> {
        let sent = matches!(kind, CallKind::Dispatch | CallKind::CachedDispatch);
        self.fixed.spec.record.filter(|_| sent && dtype != Dtype::Bytes)
    }
}

impl PlannedExchange {
    /// Enqueues that tokens of this type become records.
    ///
    /// # Errors
    /// As [`ExpertParallel::quantise_into`](crate::ExpertParallel::quantise_into).
    pub fn quantise(
        &self,
        (tokens, dtype): (&DeviceRange, Dtype),
        records: &DeviceRange,
    ) -> Result<(), Error> {
        let (common, spec) = (&self.common, &self.common.fixed.spec);
        let rows = tokens.len() / (spec.hidden * dtype.size()) as u64;
        let rows = u32::try_from(rows).unwrap_or(u32::MAX);
        // Without an index there is no fault to report.
        let status = common.word(common.shape.seatless(), StreamFlag::Status)?;
        let args = RecordArgs {
            hidden: spec.hidden as u32,
            dtype,
            sources: rows,
            rows,
            from: tokens.span(0, tokens.len())?,
            index: None,
            out: records.span(0, records.len())?,
            status,
        };
        Ok(self.kernels.records(&self.stream, &args)?)
    }
}
