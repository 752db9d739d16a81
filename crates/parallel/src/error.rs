//! Errors of meshes, with data in fields.

/// A mesh cannot be made, or a question about it has no answer.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum MeshError {
    /// The sizes do not multiply to the number of ranks.
    #[error("{ranks} ranks, but {} = {product}", factors(.sizes))]
    Sizes {
        /// Ranks to place.
        ranks: u32,
        /// Names and sizes.
        sizes: Vec<(String, u32)>,
        /// Their product, or the largest number if it is larger.
        product: u64,
    },
    /// A dimension without ranks.
    #[error("dimension {name} has size 0: leave it out, or give it size 1")]
    NoSize {
        /// The dimension.
        name: String,
    },
    /// A dimension that is named twice.
    #[error("dimension {name} is named twice")]
    Twice {
        /// The dimension.
        name: String,
    },
    /// A dimension that the mesh does not have.
    #[error("no dimension {name}: the mesh has {}", .known.join(", "))]
    Unknown {
        /// The name.
        name: String,
        /// Names that the mesh has.
        known: Vec<String>,
    },
    /// A rank that the mesh does not have.
    #[error("no rank {rank}: the mesh has {ranks} ranks")]
    NoRank {
        /// The rank.
        rank: u32,
        /// Ranks of the mesh.
        ranks: u32,
    },
    /// The expert dimensions do not divide the ranks that hold a layer.
    #[error(
        "ep {expert} x etp {expert_tensor} = {} does not divide {} = {ranks}",
        u64::from(*.expert) * u64::from(*.expert_tensor),
        factors(.folded)
    )]
    Experts {
        /// Size of expert parallelism.
        expert: u32,
        /// Size of expert tensor parallelism.
        expert_tensor: u32,
        /// Dimensions that are folded.
        folded: Vec<(String, u32)>,
        /// Their product.
        ranks: u32,
    },
    /// Dimensions that hold a layer together are not next to each other, so they do not fold.
    #[error("{between} lies between the dimensions that hold a layer: move {name} before it")]
    Apart {
        /// The dimension behind.
        name: String,
        /// The dimension between.
        between: String,
    },
    /// A world with another number of ranks.
    #[error("the mesh has {ranks} ranks, the world {world}")]
    OtherWorld {
        /// Ranks of the mesh.
        ranks: u32,
        /// Ranks of the world.
        world: u32,
    },
    /// The world cannot make the group.
    #[error(transparent)]
    Group(#[from] sidelane::Error),
}

/// Sizes as a product: "dp 2 x tp 4", or "1" if there are none.
fn factors(sizes: &[(String, u32)]) -> String {
    if sizes.is_empty() {
        return "1".to_owned();
    }
    sizes.iter().map(|(name, size)| format!("{name} {size}")).collect::<Vec<_>>().join(" x ")
}
