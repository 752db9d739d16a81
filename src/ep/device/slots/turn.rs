//! Whose turn it is: an exchange has one dispatch under way, and each of its halves is made once.

/// What an exchange does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    Dispatch,
    /// Rows are on their way.
    Landing {
        tokens: u32,
    },
    Combine {
        tokens: u32,
    },
    /// Partial rows are on their way.
    Homing {
        tokens: u32,
    },
}

impl Turn {
    /// The calls that are right now.
    pub fn name(self) -> &'static str {
        match self {
            Turn::Dispatch => "start_dispatch",
            Turn::Landing { .. } => "finish_dispatch",
            Turn::Combine { .. } => "start_combine or release",
            Turn::Homing { .. } => "finish_combine",
        }
    }

    /// Tokens of the dispatch that waits for its combine.
    pub fn combine(self) -> Option<u32> {
        if let Turn::Combine { tokens } = self { Some(tokens) } else { None }
    }
}
