//! Growth of a device heap: a window that can grow, and the members that meet for it.
//!
//! A growth is agreed on and made at all ranks, or at none. [`enqueued_growth`] decides when a call
//! asks for one.
//!
//! [`enqueued_growth`]: super::enqueued_growth

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::default_heap::STEP;
use super::device_pool::DevicePool;
use super::memory::MemoryShape;
use crate::device::Context;
use crate::error::{BootstrapError, Error, MemoryError};
use crate::schedule::Tag;
use crate::world::{DeviceWindow, Group, Growth};

/// A heap grows at most so often, and a few times more where calls need more than a chunk.
const CHUNKS: u64 = 16;

/// The window of a heap that can grow, and its members.
#[derive(Debug)]
pub(super) struct HeapGrowth {
    /// The members, who take these steps alone.
    group: Group,
    context: Arc<Context>,
    window: DeviceWindow,
    /// It grows by multiples of this.
    chunk: u64,
    /// Its size, as errors state it.
    total: Arc<AtomicU64>,
    /// A growth was refused.
    refused: bool,
}

/// A growth that was refused.
#[derive(Clone, Copy, Debug)]
pub(super) struct NotGrown {
    rank: u32,
    more: u64,
}

impl NotGrown {
    /// The error of a call that has no memory without it.
    pub fn error(self, lacks: Error) -> Error {
        match lacks {
            Error::Memory(MemoryError::OutOfSpace { rank, asked, total, .. }) => {
                let NotGrown { rank: refused, more } = self;
                MemoryError::HeapNotGrown { rank, asked, total, refused, more }.into()
            }
            other => other,
        }
    }
}

impl HeapGrowth {
    /// Of a window of this shape, if it may grow. Collective.
    ///
    /// # Errors
    /// As [`Group::subgroup`].
    pub fn of(
        group: &Group,
        context: &Arc<Context>,
        (window, shape): (DeviceWindow, &MemoryShape),
        total: &Arc<AtomicU64>,
    ) -> Result<Option<Self>, Error> {
        let left = window.growth_left();
        if left == 0 || shape.pool_limit() == shape.pool().1 {
            return Ok(None);
        }
        let members: Vec<u32> = (0..group.size()).collect();
        let group = group.subgroup(&members)?;
        let chunk = (left / CHUNKS).max(STEP).next_multiple_of(window.granularity());
        let (context, total) = (Arc::clone(context), Arc::clone(total));
        Ok(Some(HeapGrowth { group, context, window, chunk, total, refused: false }))
    }

    /// Whether calls say what they wish for.
    pub fn wishes(&self) -> bool {
        !self.refused && self.may_grow()
    }

    /// Whether it is below its limit.
    pub fn may_grow(&self) -> bool {
        self.window.growth_left() > 0
    }

    /// Grows by the most that a rank lacks: of what it must have, and of what it wishes for. None
    /// if it has, or if the limit does not allow what a rank must have.
    ///
    /// # Errors
    /// Those that end the world.
    pub fn grow(&mut self, pool: &DevicePool, [must, wish]: [u64; 2]) -> Result<Option<NotGrown>, Error> {
        let (mut must, mut wish) = (must, wish);
        for (blob, rank) in self.group.gather(bytemuck::bytes_of(&[must, wish]))?.iter().zip(0..) {
            let [theirs, wished] = read::<[u64; 2]>(blob, rank)?;
            (must, wish) = (must.max(theirs), wish.max(wished));
        }
        let mut refused = None;
        let (chunk, left) = (self.chunk, self.window.growth_left());
        let [wished, least] =
            [wish, must].map(|lacking| lacking.checked_next_multiple_of(chunk).unwrap_or(u64::MAX).min(left));
        for by in [wished, least] {
            // The second is tried only where it is less than what was refused.
            let again = refused.is_some_and(|NotGrown { more, .. }| more <= by);
            if by == 0 || by < must || again {
                continue;
            }
            // Wishes leave the device some memory, which others may need more.
            let spare = if by == least { 0 } else { chunk };
            match self.window.grow(&self.group, &self.context, by, spare)? {
                Growth::Grown(end) => {
                    pool.grow(end);
                    self.refused = false;
                    // Relaxed: a figure of errors and reports.
                    self.total.store(pool.total(), Ordering::Relaxed);
                    tracing::info!(bytes = pool.total(), "the device heap has grown");
                    return Ok(None);
                }
                Growth::Refused(rank) => {
                    self.refused = true;
                    refused = Some(NotGrown { rank, more: by });
                }
            }
        }
        Ok(refused)
    }

    /// Says this rank's tag again, and hears those of all.
    ///
    /// # Errors
    /// Those that end the world.
    pub fn say(&self, tag: Tag) -> Result<Vec<Tag>, Error> {
        let heard = self.group.gather(bytemuck::bytes_of(&tag.to_words()))?;
        heard.iter().zip(0..).map(|(blob, rank)| Ok(Tag::from_words(read(blob, rank)?))).collect()
    }
}

fn read<T: bytemuck::AnyBitPattern>(blob: &[u8], rank: u32) -> Result<T, BootstrapError> {
    let malformed = |_| BootstrapError::Malformed { peer: format!("rank {rank}") };
    bytemuck::try_pod_read_unaligned(blob).map_err(malformed)
}
