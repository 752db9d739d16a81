//! Building a stream exchange: settings, checked here and compared between all ranks.

use std::sync::Arc;

use super::StreamExchange;
use crate::device::Context;
use crate::dtype::Dtype;
use crate::error::{Error, LaneError, PlanError};
use crate::plan::{ExpertMap, SlotShape};
use crate::rows::Arithmetic;
use crate::world::Group;

/// Settings of a [`StreamExchange`]. All ranks must choose alike.
#[derive(Clone, Debug)]
pub struct StreamExchangeBuilder<'g> {
    group: &'g Group,
    context: &'g Arc<Context>,
    experts: u32,
    map: Option<ExpertMap>,
    spec: Spec,
}

/// What is the same in every call.
#[derive(Clone, Copy, Debug)]
pub(super) struct Spec {
    pub top_k: u32,
    pub hidden: u32,
    pub dtype: Dtype,
    pub max_tokens: u32,
}

impl Spec {
    pub fn row_bytes(&self) -> u64 {
        u64::from(self.hidden) * self.dtype.size() as u64
    }
}

impl<'g> StreamExchangeBuilder<'g> {
    pub(super) fn new(group: &'g Group, context: &'g Arc<Context>) -> Self {
        let spec = Spec { top_k: 1, hidden: 0, dtype: Dtype::Bf16, max_tokens: 128 };
        StreamExchangeBuilder { group, context, experts: 0, map: None, spec }
    }

    /// Number of experts, in contiguous blocks over the ranks.
    pub fn experts(mut self, experts: u32) -> Self {
        self.experts = experts;
        self
    }

    /// Where experts live, if not in contiguous blocks. Sets the number of experts, too.
    pub fn expert_map(mut self, map: ExpertMap) -> Self {
        self.map = Some(map);
        self
    }

    /// Choices per token.
    pub fn top_k(mut self, top_k: u32) -> Self {
        self.spec.top_k = top_k;
        self
    }

    /// Elements of a row. A row must be a multiple of 16 bytes.
    pub fn hidden(mut self, hidden: u32) -> Self {
        self.spec.hidden = hidden;
        self
    }

    /// Element type of rows, of tokens and partial rows alike. Default: bf16.
    pub fn dtype(mut self, dtype: Dtype) -> Self {
        self.spec.dtype = dtype;
        self
    }

    /// The most tokens that a rank passes in one call: so many rows move to each rank in each call. Default: 128.
    pub fn max_tokens(mut self, tokens: u32) -> Self {
        self.spec.max_tokens = tokens;
        self
    }

    /// Takes memory of the device, maps that of the others, and loads the kernels; with several nodes, registers it with network
    /// cards, or pins as much of the host's beside it, and starts the proxy. Collective.
    ///
    /// # Errors
    /// [`PlanError`] if a setting cannot be used; [`CallError::ConfigsDiffer`](crate::error::CallError) if ranks chose
    /// differently; what a lane says if it cannot join their nodes;
    /// [`DeviceError`](crate::error::DeviceError) if the device or the driver lacks something, or loads kernels lazily, and
    /// [`MemoryError::NotUsable`](crate::error::MemoryError) or [`LaneError::PeerLacks`] on the other ranks.
    pub fn build(self) -> Result<StreamExchange, Error> {
        let checked = self.check();
        let spec = &self.spec;
        let map = checked.as_ref().ok();
        let settings: [(&'static str, u64); 7] = [
            ("whether their settings can be used (1: yes)", map.is_some().into()),
            ("experts", map.map_or(0, |(map, _)| map.experts().into())),
            ("the expert map", map.map_or(0, |(map, _)| map.digest())),
            ("top_k", spec.top_k.into()),
            ("hidden", spec.hidden.into()),
            ("dtype", spec.dtype as u64),
            ("max_tokens", spec.max_tokens.into()),
        ];
        // A rank with bad settings still takes part in the comparison: the others are told, not left waiting.
        self.group.alike(&settings)?;
        let (map, shape) = checked?;
        let made = StreamExchange::new(self.group, self.context, self.spec, &map, shape);
        let lacks = made.as_ref().err().map_or_else(String::new, ToString::to_string);
        let all = self.group.gather(lacks.as_bytes())?;
        let made = made?;
        match all.iter().zip(self.group.ranks()).find(|(lacks, _)| !lacks.is_empty()) {
            Some((lacks, &rank)) => {
                let reason = String::from_utf8_lossy(lacks).into_owned();
                Err(LaneError::PeerLacks { rank, lane: "copy engine", reason }.into())
            }
            None => Ok(made),
        }
    }

    fn check(&self) -> Result<(ExpertMap, SlotShape), PlanError> {
        let spec = &self.spec;
        let bad = |parameter, seen: u64, expected| PlanError::BadParameter { parameter, seen, expected };
        let ranks = self.group.size();
        // Before there are tables of them.
        if u64::from(self.experts) * 4 > self.group.shared.options.config.symmetric {
            return Err(bad(
                "experts",
                self.experts.into(),
                "fewer: a word each must fit SIDELANE_SYMMETRIC",
            ));
        }
        let map = match &self.map {
            Some(map) => map.clone(),
            None => ExpertMap::contiguous(self.experts, ranks)?,
        };
        if map.ranks() != ranks {
            return Err(bad("ranks of the expert map", map.ranks().into(), "the size of the group"));
        }
        if map.experts() > i32::MAX as u32 {
            return Err(bad("experts", map.experts().into(), "below 2^31"));
        }
        if spec.top_k == 0 || spec.top_k > map.experts() {
            return Err(bad("top_k", spec.top_k.into(), "between 1 and the number of experts"));
        }
        Arithmetic::try_from(spec.dtype)?;
        let shape = SlotShape::new(spec.max_tokens, spec.top_k, spec.row_bytes())?;
        Ok((map, shape))
    }
}
