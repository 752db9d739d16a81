//! On which machines the ranks of a job are, what joins them, and what their clocks say.

use serde::Serialize;
use sidelane::bootstrap::Location;
use sidelane::{Error, Group, World};

/// For each rank of a group the number of its machine. Rank 0's is number 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Machines(Vec<u32>);

/// Machines of a job, in numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Hosts {
    /// How many.
    pub machines: usize,
    /// Of that of rank 0.
    pub cores: usize,
}

impl Hosts {
    /// "1 machine, 2 cores", with more about that of rank 0.
    pub fn text(self, more: &str) -> String {
        let Hosts { machines, cores } = self;
        let of = if machines == 1 { ", " } else { "; that of rank 0: " };
        format!("{}{of}{cores} cores{more}", words(machines))
    }
}

impl Machines {
    /// Asks all ranks. Collective.
    pub fn of(group: &Group) -> Result<Self, Error> {
        let mut known: Vec<Location> = Vec::new();
        let mut machines = Vec::new();
        for (label, rank) in group.gather(&Location::here()?.to_bytes())?.iter().zip(0..) {
            let place = Location::from_bytes(rank, label)?;
            let at = known.iter().position(|other| other.same_machine(&place)).unwrap_or_else(|| {
                known.push(place);
                known.len() - 1
            });
            machines.push(at as u32);
        }
        Ok(Machines(machines))
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.0.iter().max().map_or(0, |&last| last as usize + 1)
    }

    /// How many there are, and the cores of this one, which is that of rank 0.
    pub fn hosts(&self) -> Hosts {
        Hosts { machines: self.count(), cores: cores() }
    }

    /// Number of the machine of a rank.
    pub fn of_rank(&self, rank: usize) -> u32 {
        self.0[rank]
    }

    fn leaders(&self) -> Vec<u32> {
        let ranks = (0..).zip(&self.0);
        (0..self.count() as u32)
            .filter_map(|machine| ranks.clone().find(|&(_, &at)| at == machine).map(|(rank, _)| rank))
            .collect()
    }

    /// The difference to add to this rank's clock to get that of rank 0, in the unit of `now`.
    /// Collective.
    ///
    /// Rank 0 asks the first rank of each machine for its time and assigns the answer to the middle
    /// of the round trip. Of many answers the quickest has the least error, at most half its round
    /// trip. Clocks drift: a result holds for seconds, not for minutes.
    pub fn clock_offset(&self, group: &Group, now: impl Fn() -> u64) -> Result<i64, Error> {
        const QUESTIONS: u64 = 64;
        if self.count() == 1 {
            return Ok(0);
        }
        let mut window = group.window(size_of::<u64>() as u64)?;
        let mut offsets = vec![0i64; self.count()];
        for (machine, &leader) in self.leaders().iter().enumerate().skip(1) {
            if group.rank() == leader {
                for question in 1..=QUESTIONS {
                    window.wait_until(0, question)?;
                    window.put_signal(0, 0, &now().to_le_bytes(), question)?;
                }
            } else if group.rank() == 0 {
                let mut quickest = u64::MAX;
                for question in 1..=QUESTIONS {
                    let (begin, mut answer) = (now(), [0; size_of::<u64>()]);
                    window.signal(leader, question)?;
                    window.wait_until(leader, question)?;
                    let taken = now() - begin;
                    window.read(0, &mut answer)?;
                    if taken < quickest {
                        quickest = taken;
                        let middle = begin + taken / 2;
                        offsets[machine] = middle.wrapping_sub(u64::from_le_bytes(answer)) as i64;
                    }
                }
            }
        }
        let said = group.gather(bytemuck::cast_slice(&offsets))?;
        let offsets: Vec<i64> = bytemuck::allocation::pod_collect_to_vec(&said[0]);
        Ok(offsets[self.of_rank(group.rank() as usize) as usize])
    }
}

/// Cores of this machine that this process may use.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// The lane between the nodes of a world, and the reason of the choice; none if there is only one
/// node.
pub fn net(world: &World) -> Option<(String, String)> {
    world.net().map(|net| (net.lane.to_owned(), net.reason.clone()))
}

/// "1 machine", "2 machines".
pub fn words(count: usize) -> String {
    format!("{count} machine{}", if count == 1 { "" } else { "s" })
}

/// By the number of each rank's machine.
impl From<Vec<u32>> for Machines {
    fn from(machines: Vec<u32>) -> Self {
        Machines(machines)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use crate::worlds::on_ranks;

    use super::*;
    use crate::TestError;

    #[test]
    fn ranks_of_one_machine_are_told_so() {
        let told =
            on_ranks(&World::threads(3).unwrap(), |world| Ok::<_, TestError>(Machines::of(&world.all()?)?));
        for machines in told.into_iter().map(Result::unwrap) {
            assert_eq!((machines.count(), machines.leaders()), (1, vec![0]));
        }
    }

    #[test]
    fn clock_offset_of_other_machine_is_exact_to_query_time() {
        const AHEAD: u64 = 5_000_000_000;
        let begin = Instant::now();
        let machines = Machines::from(vec![0, 1, 0, 1]);
        let offsets = on_ranks(&World::threads(4).unwrap(), |world| {
            let ahead = if machines.of_rank(world.rank() as usize) == 1 { AHEAD } else { 0 };
            let now = || begin.elapsed().as_nanos() as u64 + ahead;
            Ok::<_, TestError>(machines.clock_offset(&world.all()?, now)?)
        });
        let offsets: Vec<i64> = offsets.into_iter().map(Result::unwrap).collect();
        let taken = begin.elapsed().as_nanos() as i64;
        assert_eq!((offsets[0], offsets[2], offsets[1]), (0, 0, offsets[3]));
        assert!((offsets[1] + AHEAD as i64).abs() <= taken, "{offsets:?} after {taken} ns");
    }
}
