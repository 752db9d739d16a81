//! The timed calls, each beside its floor.
//!
//! Real and floor alternate round by round in the same processes, and take turns in going first, so that a busy moment
//! of the machine or a throttled core meets both alike.

use sidelane::ep::{Handle, Yardstick};
use sidelane::rows::{Arithmetic, Stores};
use sidelane::{Error, ExpertParallel, Group, Window};

use super::clock::Laps;
use super::config::Config;
use super::layer::{Layer, Tokens};
use super::peers::Field;
use super::tensor::Number;
use crate::error::CliError;
use crate::machines::Machines;

/// One kind of call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Dispatch,
    Combine,
    DispatchBackward,
    CombineBackward,
}

impl Kind {
    /// What is timed, in phases: the calls of one share a place for rows, which may be of another type in the next.
    pub fn phases(backward: bool) -> &'static [[Kind; 2]] {
        const ALL: [[Kind; 2]; 2] =
            [[Kind::Dispatch, Kind::Combine], [Kind::DispatchBackward, Kind::CombineBackward]];
        if backward { &ALL } else { &ALL[..1] }
    }

    /// Whether rows are summed; otherwise they are scattered.
    pub fn sums(self) -> bool {
        matches!(self, Kind::Combine | Kind::DispatchBackward)
    }
}

/// Laps of one kind of call.
#[derive(Clone, Debug, Default)]
pub struct Pair {
    pub real: Laps,
    pub floor: Laps,
}

/// What all rounds use.
pub struct Track<'a, E> {
    pub ep: &'a mut ExpertParallel,
    pub barrier: &'a mut Window,
    pub machines: &'a Machines,
    pub config: &'a Config,
    pub routing: &'a sidelane::gate::Routing<'static>,
    pub tokens: &'a Tokens<E>,
    pub out: &'a mut [E],
    pub yardstick: &'a mut Yardstick,
    /// Others, who take turns with us.
    pub field: &'a mut Field,
    /// Faster stores of the floor, for scattered rows and for sums.
    pub stores: [Stores; 2],
    /// Handle of a dispatch that stays alive: combines and backward calls follow it.
    pub handle: &'a Handle,
    /// Whether a real call did not get the yardstick's memory: then its floor has not been measured.
    pub moved: bool,
}

impl<E: Number> Track<'_, E> {
    /// One round of all kinds: ours and the floor, then the others.
    pub fn round(&mut self, kinds: &[Kind], pairs: &mut [Pair], floor_first: bool) -> Result<(), CliError> {
        kinds.iter().zip(pairs).try_for_each(|(&kind, pair)| {
            self.lap(kind, pair, floor_first)?;
            // Who is done must not start others while we are at work: they would take a core from us.
            self.barrier.barrier()?;
            self.field.lap(kind)
        })
    }

    /// One round of one kind: real and floor, in this order or the other. Each is run twice and timed the second time, so
    /// that it finds the caches as it left them itself, not as the other did.
    fn lap(&mut self, kind: Kind, pair: &mut Pair, floor_first: bool) -> Result<(), Error> {
        for floor in [floor_first, !floor_first] {
            if floor {
                self.floor(kind, &mut Laps::default())?;
                self.floor(kind, &mut pair.floor)?;
            } else {
                self.real(kind, &mut Laps::default())?;
                self.real(kind, &mut pair.real)?;
            }
        }
        Ok(())
    }

    /// The real call, in the yardstick's memory.
    fn real(&mut self, kind: Kind, laps: &mut Laps) -> Result<(), Error> {
        match kind {
            Kind::Dispatch => {
                drop(self.yardstick.lend_rows());
                self.barrier.barrier()?;
                let (rows, _) = laps.time(|| self.tokens.dispatch(self.ep, self.routing))?;
                self.moved |= self.yardstick.keep_rows(rows).is_err();
            }
            Kind::CombineBackward => {
                drop(self.yardstick.lend_rows());
                self.barrier.barrier()?;
                let x = self.tokens.x()?;
                let (rows, _) = laps.time(|| self.ep.combine_backward(x, self.handle))?;
                self.moved |= self.yardstick.keep_rows(rows).is_err();
            }
            Kind::Combine | Kind::DispatchBackward => {
                let y = self.yardstick.lend_output().map_or_else(|| self.handle.output(), Ok)?;
                self.barrier.barrier()?;
                match kind {
                    Kind::Combine => laps.time(|| self.ep.combine_into(y, self.handle, &mut *self.out))?,
                    _ => laps.time(|| {
                        self.ep.dispatch_backward_into(y, None, self.handle, &mut *self.out, &mut [])
                    })?,
                }
                // Once all are here, all have read it, and it is free again.
                self.barrier.barrier()?;
                self.moved |= self.yardstick.keep_output(self.handle.output()?).is_err();
            }
        }
        Ok(())
    }

    fn floor(&mut self, kind: Kind, laps: &mut Laps) -> Result<(), Error> {
        self.barrier.barrier()?;
        let [scatter, sum] = self.stores;
        let (floor, dtype) = (&mut *self.yardstick, Arithmetic::try_from(self.config.dtype.element())?);
        let input = match kind {
            Kind::CombineBackward => bytemuck::cast_slice(self.tokens.x()?),
            _ => self.tokens.sent()?,
        };
        if kind.sums() {
            let out = bytemuck::cast_slice_mut(self.out);
            laps.time(|| floor.combine(dtype, out, sum));
        } else {
            laps.time(|| floor.dispatch(input, scatter));
        }
        Ok(())
    }

    /// Finds the faster stores for the floor: a few rounds of each, as they will be timed, decided alike on all ranks.
    pub fn choose_stores(&mut self, group: &Group, kinds: &[Kind]) -> Result<[Stores; 2], Error> {
        const MOST: usize = 15;
        // Where rounds are few they are slow, and choosing must not take longer than they do.
        let count = MOST.min(self.config.rounds as usize).max(1);
        for &kind in kinds {
            let at = usize::from(kind.sums());
            let mut best = f64::INFINITY;
            for stores in [Stores::Streaming, Stores::Cached] {
                let mut pair = Pair::default();
                let before = std::mem::replace(&mut self.stores[at], stores);
                for _ in 0..count {
                    self.lap(kind, &mut pair, false)?;
                }
                let mut rounds = Laps::rounds_us(&group.gather(pair.floor.to_bytes())?, self.machines);
                rounds.sort_unstable_by(f64::total_cmp);
                if rounds[count / 2] < best {
                    best = rounds[count / 2];
                } else {
                    self.stores[at] = before;
                }
            }
        }
        Ok(self.stores)
    }
}

/// Speed of memcpy, all ranks at once, from private memory to where rows land, as much as the cache does not hold: 10^9
/// bytes per second.
pub fn memcpy_gbps<E>(layer: &Layer<'_, E>, barrier: &mut Window) -> Result<f64, Error> {
    const MOST: u64 = 32 << 20;
    const ROUNDS: usize = 7;
    let Layer { world, group, .. } = layer;
    let bytes = world.pool().report().largest_free.min(MOST);
    let mut extent = world.pool().take(bytes)?;
    let to = extent.slice_mut::<u8>(0, bytes as usize)?;
    let from = vec![1u8; to.len()];
    let mut laps = Laps::default();
    for _ in 0..ROUNDS {
        barrier.barrier()?;
        laps.time(|| std::hint::black_box(&mut *to).copy_from_slice(std::hint::black_box(&from)));
    }
    let mut rounds = Laps::rounds_us(&group.gather(laps.to_bytes())?, &layer.machines);
    rounds.sort_unstable_by(f64::total_cmp);
    let sizes = group.gather(&bytes.to_le_bytes())?;
    let total: u64 =
        sizes.iter().map(|blob| bytemuck::try_pod_read_unaligned::<u64>(blob).unwrap_or(0)).sum();
    Ok(total as f64 / rounds[ROUNDS / 2] / 1e3)
}
