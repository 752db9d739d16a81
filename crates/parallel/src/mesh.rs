//! Ranks as a grid of named dimensions.
//!
//! ```text
//!   Mesh::new(8, [("pp", 2), ("dp", 2), ("tp", 2)])        the last dimension varies fastest
//!
//!              pp 0             pp 1
//!           tp 0  tp 1       tp 0  tp 1        groups of tp        {0,1} {2,3} {4,5} {6,7}
//!    dp 0     0     1          4     5         groups of dp x tp   {0,1,2,3} {4,5,6,7}
//!    dp 1     2     3          6     7         groups of pp        {0,4} {1,5} {2,6} {3,7}
//! ```
//!
//! A mesh is arithmetic on rank numbers, so a planner can ask it about ranks that do not exist.
//! [`Mesh::world_group`] makes a [`Group`] of a real world.

use sidelane::ep::TokenSlices;
use sidelane::{Dtype, Group, World};

use crate::error::MeshError;

/// Ranks as a grid of named dimensions. The last dimension varies fastest: ranks that are next to
/// each other differ there.
///
/// ```
/// use sidelane_parallel::Mesh;
///
/// let mesh = Mesh::new(8, [("pp", 2), ("dp", 2), ("cp", 1), ("tp", 2)])?;
/// assert_eq!(mesh.groups(&["tp"])?, [[0, 1], [2, 3], [4, 5], [6, 7]]);
/// assert_eq!(mesh.group(6, &["pp"])?, [2, 6]);
/// assert_eq!(mesh.experts(4, 1)?.groups(&["ep"])?, [[0, 1, 2, 3], [4, 5, 6, 7]]);
///
/// let error = Mesh::new(8, [("pp", 2), ("dp", 3), ("tp", 2)]).unwrap_err();
/// assert_eq!(error.to_string(), "8 ranks, but pp 2 x dp 3 x tp 2 = 12");
/// # Ok::<(), sidelane_parallel::MeshError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mesh {
    dimensions: Vec<Dimension>,
    ranks: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Dimension {
    name: String,
    size: u32,
    /// How far apart two ranks are that are next to each other in this dimension.
    stride: u32,
}

/// Dimensions of a stage of the pipeline, whose ranks hold the experts together.
const FOLDED: [&str; 3] = ["dp", "cp", "tp"];

impl Mesh {
    /// A grid of `ranks` ranks, with the slowest dimension first. Dimensions of experts are not
    /// among these: [`experts`](Mesh::experts) folds others into them.
    ///
    /// # Errors
    /// [`MeshError::Sizes`] if the product of the sizes is not the number of ranks,
    /// [`MeshError::NoSize`] for a size of 0, [`MeshError::Twice`] for a name that comes twice.
    pub fn new<'n>(
        ranks: u32,
        dimensions: impl IntoIterator<Item = (&'n str, u32)>,
    ) -> Result<Mesh, MeshError> {
        let sizes: Vec<(String, u32)> =
            dimensions.into_iter().map(|(name, size)| (name.to_owned(), size)).collect();
        for (nth, (name, size)) in sizes.iter().enumerate() {
            if *size == 0 {
                return Err(MeshError::NoSize { name: name.clone() });
            }
            if sizes[..nth].iter().any(|(earlier, _)| earlier == name) {
                return Err(MeshError::Twice { name: name.clone() });
            }
        }
        let product = sizes.iter().fold(1, |product: u64, (_, size)| product.saturating_mul((*size).into()));
        if product != u64::from(ranks) {
            return Err(MeshError::Sizes { ranks, sizes, product });
        }
        let mut stride = ranks;
        let dimensions = sizes.into_iter().map(|(name, size)| {
            stride /= size;
            Dimension { name, size, stride }
        });
        Ok(Mesh { dimensions: dimensions.collect(), ranks })
    }

    /// Number of ranks.
    pub fn ranks(&self) -> u32 {
        self.ranks
    }

    /// Names and sizes, the slowest dimension first.
    pub fn dimensions(&self) -> impl Iterator<Item = (&str, u32)> {
        self.dimensions.iter().map(|dimension| (dimension.name.as_str(), dimension.size))
    }

    /// Ranks in a group of these dimensions.
    ///
    /// # Errors
    /// [`MeshError::Unknown`] or [`MeshError::Twice`] for a name.
    pub fn size(&self, of: &[&str]) -> Result<u32, MeshError> {
        Ok(self.chosen(of)?.iter().map(|dimension| dimension.size).product())
    }

    /// Position of a rank in a dimension.
    ///
    /// # Errors
    /// [`MeshError::NoRank`], [`MeshError::Unknown`].
    pub fn position(&self, rank: u32, dimension: &str) -> Result<u32, MeshError> {
        self.check(rank)?;
        let dimension = self.dimension(dimension)?;
        Ok(rank / dimension.stride % dimension.size)
    }

    /// The group of a rank: all ranks that differ from it in these dimensions alone, ascending.
    ///
    /// # Errors
    /// [`MeshError::NoRank`], [`MeshError::Unknown`] or [`MeshError::Twice`] for a name.
    pub fn group(&self, rank: u32, of: &[&str]) -> Result<Vec<u32>, MeshError> {
        self.check(rank)?;
        let chosen = self.chosen(of)?;
        Ok(members(&chosen, first(&chosen, rank)))
    }

    /// The first and the last rank of a rank's group of a dimension: one rank alone, if it has only
    /// one. On the ends of `pp` tied embeddings are there twice, and their gradients are added
    /// ([`TiedWeights`](crate::tensor::TiedWeights)).
    ///
    /// ```
    /// use sidelane_parallel::Mesh;
    ///
    /// let mesh = Mesh::new(6, [("pp", 3), ("tp", 2)])?;
    /// assert_eq!(mesh.ends(3, "pp")?, [1, 5]);
    /// # Ok::<(), sidelane_parallel::MeshError>(())
    /// ```
    ///
    /// # Errors
    /// [`MeshError::NoRank`], [`MeshError::Unknown`].
    pub fn ends(&self, rank: u32, dimension: &str) -> Result<Vec<u32>, MeshError> {
        let mut group = self.group(rank, &[dimension])?;
        let last = group.len() - 1;
        group.swap(1.min(last), last);
        group.truncate(2);
        Ok(group)
    }

    /// All groups of these dimensions, by their first rank. Every rank is in one of them.
    ///
    /// # Errors
    /// As [`Mesh::size`].
    pub fn groups(&self, of: &[&str]) -> Result<Vec<Vec<u32>>, MeshError> {
        let chosen = self.chosen(of)?;
        let firsts = (0..self.ranks).filter(|&rank| first(&chosen, rank) == rank);
        Ok(firsts.map(|rank| members(&chosen, rank)).collect())
    }

    /// The same ranks as the layers of experts see them. Experts do not care how attention cuts its
    /// ranks, so Megatron folds `dp x cp x tp` into `edp x ep x etp`: `expert` ranks share the
    /// experts of a layer, `expert_tensor` ranks cut each expert, and what remains holds copies.
    ///
    /// ```text
    ///   attention    pp 1 x dp 4 x tp 2             tp    {0,1} {2,3} {4,5} {6,7}
    ///   experts      pp 1 x edp 2 x ep 4 x etp 1    ep    {0,1,2,3} {4,5,6,7}
    ///                                               edp   {0,4} {1,5} {2,6} {3,7}    gradients of experts
    /// ```
    ///
    /// # Errors
    /// [`MeshError::Experts`] if `ep x etp` does not divide the ranks that are folded,
    /// [`MeshError::Apart`] if a dimension of another kind lies between these.
    pub fn experts(&self, expert: u32, expert_tensor: u32) -> Result<Mesh, MeshError> {
        let is_folded = |dimension: &Dimension| FOLDED.contains(&dimension.name.as_str());
        let first = self.dimensions.iter().position(is_folded).unwrap_or(self.dimensions.len());
        let (before, rest) = self.dimensions.split_at(first);
        let (folded, behind) = rest.split_at(rest.iter().position(|of| !is_folded(of)).unwrap_or(rest.len()));
        if let Some(apart) = behind.iter().find(|dimension| is_folded(dimension)) {
            return Err(MeshError::Apart { name: apart.name.clone(), between: behind[0].name.clone() });
        }
        let ranks: u32 = folded.iter().map(|dimension| dimension.size).product();
        let product = u64::from(expert) * u64::from(expert_tensor);
        if product == 0 || !u64::from(ranks).is_multiple_of(product) {
            let folded = folded.iter().map(|of| (of.name.clone(), of.size)).collect();
            return Err(MeshError::Experts { expert, expert_tensor, folded, ranks });
        }
        let copies = (u64::from(ranks) / product) as u32;
        let experts = [("edp", copies), ("ep", expert), ("etp", expert_tensor)];
        let [before, behind] = [before, behind].map(|part| part.iter().map(|of| (of.name.as_str(), of.size)));
        Mesh::new(self.ranks, before.chain(experts).chain(behind))
    }

    /// This rank's group of these dimensions, in a world of as many ranks as the mesh has.
    /// Collective among the group, as [`World::group`] is.
    ///
    /// ```
    /// use sidelane::World;
    /// use sidelane_parallel::Mesh;
    ///
    /// let mesh = Mesh::new(4, [("dp", 2), ("tp", 2)])?;
    /// for world in World::threads(4)? {
    ///     let tensor = mesh.world_group(&world, &["tp"])?;
    ///     assert_eq!((tensor.rank(), tensor.size()), (world.rank() % 2, 2));
    /// }
    /// # Ok::<(), sidelane_parallel::MeshError>(())
    /// ```
    ///
    /// # Errors
    /// [`MeshError::OtherWorld`] if the world has another number of ranks; as [`Mesh::group`] and
    /// [`World::group`].
    pub fn world_group(&self, world: &World, of: &[&str]) -> Result<Group, MeshError> {
        self.has_ranks_of(world)?;
        Ok(world.group(&self.group(world.rank(), of)?)?)
    }

    /// The group of this rank's [`ends`](Mesh::ends), and none on the ranks between them.
    /// Collective among the ends.
    ///
    /// # Errors
    /// As [`world_group`](Mesh::world_group).
    pub fn world_ends(&self, world: &World, dimension: &str) -> Result<Option<Group>, MeshError> {
        self.has_ranks_of(world)?;
        let ends = self.ends(world.rank(), dimension)?;
        let group = ends.contains(&world.rank()).then(|| world.group(&ends));
        Ok(group.transpose()?)
    }

    /// Slices of the buffer of a layer's experts, `[experts, capacity, columns]`, over this rank's
    /// group of `tp`: each rank sends a part of the tokens, which all of them have (DeepSpeed's
    /// `drop_tokens`). `experts` is the mesh of the layer ([`experts`](Mesh::experts)). Collective
    /// among the group.
    ///
    /// ```
    /// use sidelane::{Dtype, World};
    /// use sidelane_parallel::{Mesh, MeshError};
    ///
    /// let attention = Mesh::new(1, [("dp", 1), ("tp", 1)])?;
    /// let world = World::threads(1).map_err(MeshError::Group)?.remove(0);
    /// let slices = attention.token_slices(&world, &attention.experts(1, 1)?, [2, 3, 4], Dtype::F32)?;
    /// assert_eq!(slices.drop_tokens(&[1.0_f32; 24]).map_err(MeshError::Group)?, [1.0; 24]);
    ///
    /// let attention = Mesh::new(4, [("dp", 2), ("tp", 2)])?;
    /// let error = attention.token_slices(&world, &attention.experts(2, 2)?, [2, 4, 4], Dtype::F32).unwrap_err();
    /// assert_eq!(error.to_string(), "etp 2: ranks that hold parts of the same experts need the same tokens");
    /// # Ok::<(), MeshError>(())
    /// ```
    ///
    /// # Errors
    /// [`MeshError::CutExperts`] if the experts are tensor parallel, because their outputs are
    /// partial sums of the same tokens; as [`world_group`](Mesh::world_group) and
    /// [`TokenSlices::new`].
    pub fn token_slices(
        &self,
        world: &World,
        experts: &Mesh,
        buffer: [u32; 3],
        dtype: Dtype,
    ) -> Result<TokenSlices, MeshError> {
        let expert_tensor = experts.size(&["etp"])?;
        if expert_tensor > 1 {
            return Err(MeshError::CutExperts { expert_tensor });
        }
        Ok(TokenSlices::new(&self.world_group(world, &["tp"])?, buffer, dtype)?)
    }

    fn has_ranks_of(&self, world: &World) -> Result<(), MeshError> {
        if world.size() == self.ranks {
            return Ok(());
        }
        Err(MeshError::OtherWorld { ranks: self.ranks, world: world.size() })
    }

    fn check(&self, rank: u32) -> Result<(), MeshError> {
        if rank < self.ranks { Ok(()) } else { Err(MeshError::NoRank { rank, ranks: self.ranks }) }
    }

    fn dimension(&self, name: &str) -> Result<&Dimension, MeshError> {
        self.dimensions.iter().find(|dimension| dimension.name == name).ok_or_else(|| {
            let known = self.dimensions.iter().map(|dimension| dimension.name.clone()).collect();
            MeshError::Unknown { name: name.to_owned(), known }
        })
    }

    /// These dimensions in the order of the mesh, however they are named.
    fn chosen(&self, of: &[&str]) -> Result<Vec<&Dimension>, MeshError> {
        for (nth, name) in of.iter().enumerate() {
            self.dimension(name)?;
            if of[..nth].contains(name) {
                return Err(MeshError::Twice { name: (*name).to_owned() });
            }
        }
        Ok(self.dimensions.iter().filter(|dimension| of.contains(&dimension.name.as_str())).collect())
    }
}

/// The first rank of a rank's group of these dimensions.
fn first(of: &[&Dimension], rank: u32) -> u32 {
    let inside = |dimension: &&Dimension| rank / dimension.stride % dimension.size * dimension.stride;
    rank - of.iter().map(inside).sum::<u32>()
}

/// The group of these dimensions that begins at a rank.
fn members(of: &[&Dimension], first: u32) -> Vec<u32> {
    of.iter().fold(vec![first], |group, dimension| {
        let along = |first| (0..dimension.size).map(move |nth| first + nth * dimension.stride);
        group.into_iter().flat_map(along).collect()
    })
}
