//! Sums of the rows that returned.

use sidelane::device::{Addresses, SumArgs};
use sidelane::dtype::{Dtype, PARTIAL, PartialDtype};
use sidelane::error::{KernelFault, PlanError};
use sidelane::plan::SlotShape;
use sidelane::rows::Arithmetic;

use crate::TestError;
use crate::device::gpu::{Bench, same};
use crate::values::{Random, Terms, any_row};

/// Types of the rows and of the results.
pub const TYPES: [(Dtype, Dtype); 5] = [
    (Dtype::F32, Dtype::F32),
    (Dtype::Bf16, Dtype::Bf16),
    (Dtype::F16, Dtype::F16),
    (Dtype::F32, Dtype::Bf16),
    (Dtype::F32, Dtype::F16),
];

/// The rows that returned to one rank.
#[derive(Clone, Debug)]
pub struct ReturnedRows {
    /// Of a slot.
    pub shape: SlotShape,
    /// Tokens that are summed.
    pub tokens: u32,
    /// Elements of a row.
    pub columns: u32,
    /// Of the rows and of the results.
    pub types: (Dtype, Dtype),
    /// For each rank and row of its slot.
    pub rows: Vec<Vec<Vec<u8>>>,
    /// `[tokens, ranks]`: the token's row at each rank, or -1.
    pub places: Vec<i32>,
    /// The status word before the launch.
    pub status: u32,
}

impl ReturnedRows {
    /// Special values everywhere, so that the sums meet them in all combinations.
    ///
    /// # Errors
    /// A type that is not summed.
    pub fn any(
        random: &mut Random,
        shape: SlotShape,
        (tokens, ranks, columns): (u32, u32, u32),
        places: Vec<i32>,
        types: (Dtype, Dtype),
    ) -> Result<Self, PlanError> {
        let kind = Arithmetic::try_from(types.0)?;
        let rows = (0..ranks)
            .map(|_| (0..shape.max_tokens()).map(|_| any_row(random, kind, columns as usize)).collect())
            .collect();
        Ok(ReturnedRows { shape, tokens, columns, types, rows, places, status: 0 })
    }

    /// The results of the device, and the status word.
    pub fn sum(&self, bench: &Bench) -> Result<(Vec<u8>, Option<KernelFault>), TestError> {
        let row_bytes = u64::from(self.columns) * self.types.0.size() as u64;
        let bytes = u64::from(self.shape.max_tokens()) * row_bytes;
        let rows = bench.put(&self.rows.concat().concat())?;
        let returned_rows = 0..self.rows.len() as u64;
        let spans = returned_rows
            .map(|rank| rows.range().span(rank * bytes, bytes))
            .collect::<Result<Vec<_>, _>>()?;
        let table = bench.room(spans.len() as u64 * 8)?;
        let out = bench.room(u64::from(self.tokens * self.columns) * self.types.1.size() as u64)?;
        let (places, status) = (bench.put(&self.places)?, bench.put(&[self.status])?);
        let sum = SumArgs {
            shape: self.shape,
            tokens: self.tokens,
            columns: self.columns,
            rows: self.types.0,
            dtype: self.types.1,
            returned_rows: &Addresses::new(&bench.stream, table.range(), &spans)?,
            places: places.span()?,
            status: status.word()?,
            marks: None,
            out: out.span()?,
        };
        bench.kernels.sum(&bench.stream, &sum)?;
        Ok((bench.read(&out)?, KernelFault::of(bench.words::<u32>(&status)?[0])))
    }

    /// The rows of a token, ranks ascending, and their groups: one of each rank.
    pub fn terms(&self, token: u32) -> (Vec<Vec<u8>>, Vec<u32>) {
        let ranks = self.rows.len();
        let places = &self.places[token as usize * ranks..][..ranks];
        let rows: Vec<_> = places
            .iter()
            .zip(&self.rows)
            .filter(|&(&place, _)| place >= 0)
            .map(|(&place, rows)| rows[place as usize].clone())
            .collect();
        let group = if self.types.0 == self.types.1 { 1 } else { PARTIAL };
        let groups = vec![group; rows.len()];
        (rows, groups)
    }

    /// The results by their definition.
    ///
    /// # Errors
    /// A type that is not summed.
    pub fn reference(&self) -> Result<Vec<u8>, PlanError> {
        let dtype = Arithmetic::try_from(self.types.1)?;
        let of = |token| {
            let (rows, groups) = self.terms(token);
            let terms = Terms { dtype, wire: PartialDtype::F32, rows: &rows, weights: None, groups: &groups };
            terms.sum(self.columns as usize, dtype)
        };
        Ok((0..self.tokens).flat_map(of).collect())
    }

    /// Compares the device's sums with the reference.
    pub fn check(&self, bench: &Bench) -> Result<(), TestError> {
        let (seen, fault) = self.sum(bench)?;
        if let Some(fault) = fault {
            return Err(TestError::Wrong(format!("a fault where none is: {fault}")));
        }
        same("sums", &seen, &self.reference()?)
    }
}
