//! Making an exchange: memory, kernels, programs.

use std::sync::Arc;

use super::StreamExchange;
use super::builder::Spec;
use super::exchange::{DEAD, FLAGS};
use super::places::{Places, Tables};
use super::turn::Turn;
use crate::device::{Context, Kernels, Priority, Stream};
use crate::ep::guard::Guard;
use crate::error::{Error, LaneError};
use crate::exec::Lowered;
use crate::plan::{ExpertMap, SlotShape};
use crate::schedule::stream::StreamProgram;
use crate::world::{DeviceWindow, Group, Member};

impl StreamExchange {
    /// This rank's. What fails after the windows are mapped fails at this rank alone: whoever calls tells the others.
    pub(super) fn new(
        group: &Group,
        context: &Arc<Context>,
        spec: Spec,
        map: &ExpertMap,
        shape: SlotShape,
    ) -> Result<Self, Error> {
        let (me, ranks) = (group.rank(), group.size());
        let places = Places::new(ranks, map.experts(), shape, spec.row_bytes())?;
        // Whatever this rank lacks, the others hear of it where windows are compared.
        let loaded = context.driver().require_eager_loading().and_then(|()| Kernels::load(context));
        let sizes = (places.bytes(), places.word_bytes());
        let ready = loaded.as_ref().map(drop).map_err(Clone::clone);
        let nodes = group.nodes();
        if let Some(peer) = (0..ranks).find(|&peer| !nodes.same_node(me, peer)) {
            let missing = "a node in common";
            return Err(LaneError::NoLane { rank: me, peer, missing }.into());
        }
        let window = DeviceWindow::new(group, context, sizes, ready)?;
        let window: Vec<Member> = window.members().into_iter().flatten().collect();
        let (kernels, own, slots) = (loaded?, &window[me as usize], *places.slots());
        let stream = Stream::new(context, Priority::Usual)?;
        let Tables { rank_of, local_of, packed_at, summed_from } =
            Tables::fill(&places, &own.memory, map, me, &stream)?;
        let lower = |program: StreamProgram| Lowered::lower(context, &program, me, &window);
        let dispatch = lower(StreamProgram::dispatch(slots, me)?)?;
        let combine = lower(StreamProgram::combine(slots, me)?)?;
        let release = lower(StreamProgram::release(slots, me)?)?;
        let peers = (0..ranks).filter(|&peer| peer != me);
        let awaited = peers.flat_map(|peer| FLAGS.map(|flag| slots.flag(peer, flag) as usize));
        let health = group.shared.hub.health();
        let guard =
            Guard::new(health, &own.words, awaited.collect(), (vec![places.status() as usize], DEAD))?;
        let received = own.memory.part(slots.receive(0), u64::from(ranks) * slots.slot_bytes())?;
        let rows = Places::part(&own.memory, places.rows())?;
        Ok(StreamExchange {
            shared: Arc::clone(&group.shared),
            world_ranks: group.ranks().to_vec(),
            me,
            device: context.device(),
            spec,
            shape,
            experts: map.experts(),
            digest: map.digest() ^ shape.bytes().rotate_left(32),
            places,
            kernels,
            rank_of,
            local_of,
            rows,
            received,
            packed_at,
            summed_from,
            dispatch,
            combine,
            release,
            turn: Turn::Dispatch,
            guard,
            window,
        })
    }
}
