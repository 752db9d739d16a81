//! Inputs of the calls, and the bits that must come of them.

use half::bf16;
use sidelane::ep::{ExpertRows, Handle};
use sidelane::gate::Routing;
use sidelane::{Dtype, Error, ExpertParallel, World, topology::Route};
use sidelane_verify::reference::{Case, Reference};

use super::phases::Trouble;

const HIDDEN: usize = 32;
/// Divisible by the ranks of each world here.
const EXPERTS: u32 = 12;
const TOP_K: u32 = 3;
/// Different inputs, in turn: bits of an earlier call are wrong.
const VARIANTS: u64 = 3;

/// Calls of one instance and their results, for one rank.
#[derive(Debug)]
pub struct Calls {
    me: usize,
    variants: Vec<Variant>,
}

/// One input, with its results.
#[derive(Debug)]
struct Variant {
    reference: Reference<bf16>,
    rows: Vec<bf16>,
    outputs: Vec<bf16>,
    sums: Vec<bf16>,
    sent: Vec<bf16>,
    gradient_rows: Vec<bf16>,
}

impl Calls {
    /// For this rank of a world. Ranks have uneven numbers of tokens, one of them none.
    pub fn new(world: &World) -> Self {
        let (size, me) = (world.size(), world.rank() as usize);
        let nodes: Vec<u32> = (0..size).map(|rank| world.nodes().node_of(rank)).collect();
        let counts: Vec<u32> = (0..size).map(|rank| rank * 5 % 17).collect();
        let case = Case { hidden: HIDDEN, ..Case::new(&nodes, &counts, EXPERTS, TOP_K) };
        let variant = |nth| {
            let seed = (u64::from(world.epoch()) << 32) + (nth << 16);
            let reference = Reference::<bf16>::seeded(&case, seed);
            let (outputs, sums) = (reference.outputs(me, 1), reference.sums(me, 1, false));
            let (sent, gradient_rows) =
                (reference.sent(2, me), reference.rows(me, |rank| reference.sent(2, rank)));
            let rows = reference.rows(me, |rank| reference.all[rank].x.clone());
            Variant { reference, rows, outputs, sums, sent, gradient_rows }
        };
        Calls { me, variants: (0..VARIANTS).map(variant).collect() }
    }

    /// An instance for these calls.
    ///
    /// # Errors
    /// Those of the builder.
    pub fn build(world: &World, route: Route) -> Result<ExpertParallel, Error> {
        let group = world.all()?;
        let builder = ExpertParallel::builder(&group).experts(EXPERTS).top_k(TOP_K).route(route);
        builder.hidden(HIDDEN).dtype(Dtype::Bf16).max_tokens(16).build()
    }

    fn variant(&self, nth: u64) -> &Variant {
        &self.variants[(nth % VARIANTS) as usize]
    }

    /// Dispatch, all rows compared.
    ///
    /// # Errors
    /// [`Trouble`].
    pub fn dispatch(&self, ep: &mut ExpertParallel, nth: u64, in_halves: bool) -> Result<Handle, Trouble> {
        let variant = self.variant(nth);
        let mine = &variant.reference.all[self.me];
        let routing =
            Routing::new(TOP_K, mine.ids.as_slice(), mine.weights.as_slice()).map_err(Error::from)?;
        ep.pool().poison(0xff);
        let (rows, handle) = match in_halves {
            true => ep.start_dispatch(&mine.x, &routing)?.finish()?,
            false => ep.dispatch(&mine.x, &routing)?,
        };
        compare("rows of a dispatch", landed(&rows)?, &variant.rows)?;
        Ok(handle)
    }

    /// Combine, all sums compared.
    ///
    /// # Errors
    /// [`Trouble`].
    pub fn combine(
        &self,
        ep: &mut ExpertParallel,
        handle: &Handle,
        nth: u64,
        in_halves: bool,
    ) -> Result<(), Trouble> {
        let variant = self.variant(nth);
        let mut out = vec![bf16::NAN; variant.sums.len()];
        ep.pool().poison(0xff);
        match in_halves {
            true => ep.start_combine(&variant.outputs, handle)?.finish(&mut out)?,
            false => ep.combine_into(&variant.outputs, handle, &mut out)?,
        }
        compare("sums of a combine", &out, &variant.sums)
    }

    /// The gradients of both, all rows and sums compared.
    ///
    /// # Errors
    /// [`Trouble`].
    pub fn gradients(&self, ep: &mut ExpertParallel, handle: &Handle, nth: u64) -> Result<(), Trouble> {
        let variant = self.variant(nth);
        ep.pool().poison(0xff);
        let (of_tokens, _) = ep.dispatch_backward::<bf16>(&variant.outputs, None, handle)?;
        compare("gradients of a dispatch", &of_tokens, &variant.sums)?;
        let (rows, _) = ep.combine_backward(&variant.sent, handle)?;
        compare("gradients of a combine", landed(&rows)?, &variant.gradient_rows)
    }
}

fn landed(rows: &ExpertRows) -> Result<&[bf16], Error> {
    rows.rows::<bf16>()
}

/// Compares the bits of a result with those that it must have.
///
/// # Errors
/// [`Trouble::Wrong`].
pub fn compare<T: bytemuck::NoUninit>(what: &str, seen: &[T], expected: &[T]) -> Result<(), Trouble> {
    let (seen, expected): (&[u8], &[u8]) = (bytemuck::cast_slice(seen), bytemuck::cast_slice(expected));
    if seen == expected {
        return Ok(());
    }
    let first = seen.iter().zip(expected).position(|(seen, expected)| seen != expected);
    let place = first.map_or("lengths".to_owned(), |byte| format!("byte {byte}"));
    Err(Trouble::Wrong(format!(
        "{what}: {} of {} bytes, first difference: {place}",
        seen.len(),
        expected.len()
    )))
}
