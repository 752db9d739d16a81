//! Transfers: several in flight at once, agreed on one after another.
//!
//! A transfer is on the link for a part of its time only. Before, ranks exchange counts, and rows
//! are packed; afterwards they are placed or summed; and all ranks wait for the latest. One
//! transfer after another would leave the link idle meanwhile. So chunks rotate among several
//! streams, each with an [`ExpertParallel`](crate::ExpertParallel) of its own:
//!
//! ```text
//!   one at a time   transfer 0   |m0|==========|m1|==========|m2|==========|        m ranks agree, rows are packed
//!                                                                                  = rows on the link
//!   two             transfer 0   |m0|==========|  |m2|==========|
//!                   transfer 1        |m1|========....|  |m3|========....|         . waits for the link
//!
//!   link            --------------|============================================
//! ```
//!
//! **Ranks agree in launch order.** A transfer begins when all ranks have agreed on the one before
//! it, on whatever stream that is. So a refused transfer is refused before any rank has begun a
//! later one, and all earlier ones complete: all ranks have made the same calls, and the next step
//! works.

use crate::error::{Error, NodeLabel, StreamId};
use crate::overlap::{Graph, Node};

/// Puts transfers on streams: those of chunk `c` on stream `c` modulo how many there are.
#[derive(Debug)]
pub(super) struct Transfers {
    streams: u32,
    last: Option<Node>,
}

impl Transfers {
    /// So many at once; 0 counts as 1.
    pub fn new(streams: u32) -> Self {
        Transfers { streams: streams.max(1), last: None }
    }

    /// Adds a node to the graph, which is [halfway](Node::halfway) when all ranks have agreed on
    /// it; `after` as in [`Graph::add`].
    pub fn add<'a, G>(
        &mut self,
        graph: &mut Graph<'a, G>,
        work: NodeLabel,
        after: &[Node],
        body: impl FnOnce(&G) -> Result<(), Error> + Send + 'a,
    ) -> Node {
        let stream = StreamId::Transfer(work.chunk % self.streams);
        let after: Vec<Node> = after.iter().copied().chain(self.last.map(Node::halfway)).collect();
        let node = graph.add(stream, work, &after, body);
        self.last = Some(node);
        node
    }
}
