//! Building an `ExpertParallel`: settings, checked here, and compared between all ranks.

use std::sync::Arc;

use super::ExpertParallel;
use crate::dtype::Dtype;
use crate::error::{CallError, Error, PlanError};
use crate::plan::{ExpertMap, Order};
use crate::schedule::Route;
use crate::world::Group;

/// What is the same in every call.
#[derive(Clone, Debug)]
pub(super) struct Spec {
    pub top_k: u32,
    pub hidden: usize,
    pub dtype: Dtype,
    pub order: Order,
    pub align: u32,
    pub max_tokens: u32,
    pub weighted: bool,
    pub map: Arc<ExpertMap>,
}

impl Spec {
    /// Bytes of a row.
    pub fn row_bytes(&self) -> u64 {
        (self.hidden * self.dtype.size()) as u64
    }
}

/// Settings of an [`ExpertParallel`]. All ranks must choose alike.
#[derive(Clone, Debug)]
pub struct ExpertParallelBuilder<'g> {
    group: &'g Group,
    experts: u32,
    map: Option<ExpertMap>,
    spec: Spec,
    route: Route,
}

impl<'g> ExpertParallelBuilder<'g> {
    pub(super) fn new(group: &'g Group) -> Result<Self, PlanError> {
        let spec = Spec {
            top_k: 1,
            hidden: 0,
            dtype: Dtype::Bf16,
            order: Order::Expert,
            align: 1,
            max_tokens: 4096,
            weighted: false,
            map: Arc::new(ExpertMap::contiguous(1, group.size())?),
        };
        Ok(ExpertParallelBuilder { group, experts: 0, map: None, spec, route: Route::Direct })
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
    pub fn hidden(mut self, hidden: usize) -> Self {
        self.spec.hidden = hidden;
        self
    }

    /// Element type of a row. Default: bf16.
    pub fn dtype(mut self, dtype: Dtype) -> Self {
        self.spec.dtype = dtype;
        self
    }

    /// Order in which a token's rows are summed. Default: by expert id.
    pub fn order(mut self, order: Order) -> Self {
        self.spec.order = order;
        self
    }

    /// Each expert's segment starts at and is padded to a multiple of this many rows. Default: 1.
    pub fn align(mut self, rows: u32) -> Self {
        self.spec.align = rows;
        self
    }

    /// The most tokens a rank will pass in one call. It sizes the control window: about
    /// `8 x max_tokens x top_k` bytes, and as much again for each rank of another node. Default: 4096.
    pub fn max_tokens(mut self, tokens: u32) -> Self {
        self.spec.max_tokens = tokens;
        self
    }

    /// Combine multiplies each row with its routing weight. Default: off, weights are applied inside the experts.
    pub fn weighted(mut self, weighted: bool) -> Self {
        self.spec.weighted = weighted;
        self
    }

    /// How rows reach other nodes.
    pub fn route(mut self, route: Route) -> Self {
        self.route = route;
        self
    }

    /// Allocates the control window and lays what wires are missing. Collective.
    ///
    /// # Errors
    /// [`PlanError`] if a setting cannot be used, [`CallError::ConfigsDiffer`] if ranks chose differently,
    /// [`MemoryError::OutOfSpace`](crate::error::MemoryError) if a rank has no room for the control window.
    pub fn build(mut self) -> Result<ExpertParallel, Error> {
        let checked = self.check();
        let map = match (&checked, self.map.take()) {
            (Err(_), _) => None,
            (Ok(()), Some(map)) => Some(map),
            (Ok(()), None) => ExpertMap::contiguous(self.experts, self.group.size()).ok(),
        };
        // A rank with bad settings still takes part in the comparison: the others are told, not left waiting.
        self.compare(map.as_ref())?;
        checked?;
        if let Some(map) = map {
            self.spec.map = Arc::new(map);
        }
        ExpertParallel::new(self.group, self.spec, self.route)
    }

    fn check(&self) -> Result<(), PlanError> {
        let spec = &self.spec;
        let bad = |parameter, seen: u64, expected| Err(PlanError::BadParameter { parameter, seen, expected });
        if let Some(map) = &self.map {
            if map.ranks() != self.group.size() {
                return bad("ranks of the expert map", map.ranks().into(), "the size of the group");
            }
        } else if self.experts == 0 {
            return bad("experts", 0, "at least 1");
        }
        let experts = self.map.as_ref().map_or(self.experts, ExpertMap::experts);
        if experts > i32::MAX as u32 {
            return bad("experts", experts.into(), "below 2^31");
        }
        if u64::from(experts) * 4 > self.group.shared.options.config.symmetric {
            return bad("experts", experts.into(), "fewer: their counts must fit SIDELANE_SYMMETRIC");
        }
        if spec.top_k == 0 || spec.top_k > experts {
            return bad("top_k", spec.top_k.into(), "between 1 and the number of experts");
        }
        if spec.row_bytes() == 0 || !spec.row_bytes().is_multiple_of(16) {
            return bad("bytes of a row", spec.row_bytes(), "a positive multiple of 16");
        }
        if spec.align == 0 {
            return bad("align", 0, "at least 1");
        }
        if u64::from(spec.max_tokens) * u64::from(spec.top_k) > u64::from(u32::MAX / 2) {
            return bad("max_tokens", spec.max_tokens.into(), "fewer: entries are counted in 32 bits");
        }
        if spec.weighted && spec.dtype == Dtype::Bytes {
            return Err(PlanError::NoArithmetic { dtype: spec.dtype });
        }
        Ok(())
    }

    fn compare(&self, map: Option<&ExpertMap>) -> Result<(), Error> {
        let spec = &self.spec;
        let settings: [(&'static str, u64); 11] = [
            ("whether their settings can be used (1: yes)", map.is_some().into()),
            ("experts", map.map_or(0, ExpertMap::experts).into()),
            ("the expert map", map.map_or(0, ExpertMap::digest)),
            ("top_k", spec.top_k.into()),
            ("hidden", spec.hidden as u64),
            ("dtype", spec.dtype as u64),
            ("order", spec.order as u64),
            ("align", spec.align.into()),
            ("max_tokens", spec.max_tokens.into()),
            ("weighted", spec.weighted.into()),
            ("route", self.route as u64),
        ];
        let mine = settings.map(|(_, value)| value);
        let rank = self.group.rank();
        for (blob, peer) in self.group.gather(bytemuck::cast_slice(&mine))?.iter().zip(0..) {
            let theirs = bytemuck::try_pod_read_unaligned::<[u64; 11]>(blob).unwrap_or([u64::MAX; 11]);
            // A rank that refuses its own settings reports that, not the difference.
            if mine[0] == 1
                && let Some(at) = (0..11).find(|&at| mine[at] != theirs[at])
            {
                let what = settings[at].0;
                return Err(CallError::ConfigsDiffer {
                    what,
                    rank,
                    peer,
                    mine: mine[at],
                    theirs: theirs[at],
                }
                .into());
            }
        }
        Ok(())
    }
}
