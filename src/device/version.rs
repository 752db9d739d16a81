//! CUDA versions, as the driver counts them.

use std::fmt;

use serde::{Serialize, Serializer};

/// A version of CUDA: 12080 is 12.8.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub i32);

impl Version {
    /// The oldest supported driver: from here on every function of the module's table exists.
    pub const OLDEST: Version = Version(12000);
    /// Sizes of a kernel's parameters can be asked.
    pub const PARAMETERS: Version = Version(12040);
    /// Memory operations on virtually mapped memory are safe, and PTX of ISA 8.5 is understood.
    pub const MAPPED_FLAGS: Version = Version(12050);
    /// Copies can be handed over in batches.
    pub const BATCHED_COPIES: Version = Version(12080);
    /// The same with a shorter list of arguments.
    pub const BATCHED_COPIES_V2: Version = Version(13000);
    /// The overlap hint of a batch counts: copies within one device are made by copy engines. Older
    /// drivers take the hint and ignore it, so SMs make these copies.
    pub const OVERLAP_HINT: Version = Version(13010);
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0 / 1000, self.0 % 1000 / 10)
    }
}

impl Serialize for Version {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}
