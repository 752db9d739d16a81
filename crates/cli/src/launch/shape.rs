//! How many ranks on how many nodes.

/// A shape that no job can have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ShapeError {
    /// `--ranks-per-node 3,5` with another number of nodes.
    #[error("--ranks-per-node lists {listed} nodes, but --nodes is {nodes}")]
    NodesDiffer { listed: usize, nodes: u32 },

    /// A node without ranks, or no node at all.
    #[error("{option} must be at least 1")]
    Zero { option: &'static str },

    /// This machine is none of the job's nodes.
    #[error("--node-rank is {node}, but the job has {nodes} nodes, counted from 0")]
    NoSuchNode { node: u32, nodes: usize },

    /// More ranks than one machine can sensibly run.
    #[error("{ranks} ranks are too many: at most {max}")]
    TooManyRanks { ranks: u64, max: u32 },
}

/// Number of ranks of each node.
pub fn node_sizes(nodes: Option<u32>, ranks_per_node: &[u32]) -> Result<Vec<u32>, ShapeError> {
    let sizes = match (nodes, ranks_per_node) {
        (Some(0), _) => return Err(ShapeError::Zero { option: "--nodes" }),
        (Some(nodes), [each]) => {
            within_rank_numbers(u64::from(nodes) * u64::from(*each))?;
            vec![*each; nodes as usize]
        }
        (Some(nodes), list) if nodes as usize != list.len() => {
            return Err(ShapeError::NodesDiffer { listed: list.len(), nodes });
        }
        (_, list) => list.to_vec(),
    };
    if sizes.contains(&0) {
        return Err(ShapeError::Zero { option: "--ranks-per-node" });
    }
    within_rank_numbers(sizes.iter().map(|&size| u64::from(size)).sum())?;
    Ok(sizes)
}

/// As [`node_sizes`]; where no sizes are given, all nodes have this one, and where no number is, there are so many.
pub fn node_sizes_or(
    (default_nodes, default_size): (u32, u32),
    nodes: Option<u32>,
    ranks_per_node: &[u32],
) -> Result<Vec<u32>, ShapeError> {
    match ranks_per_node {
        [] => node_sizes(nodes.or(Some(default_nodes)), &[default_size]),
        sizes => node_sizes(nodes, sizes),
    }
}

/// For each rank the number of its node.
pub fn node_labels(sizes: &[u32]) -> Vec<usize> {
    let sizes = sizes.iter().enumerate();
    sizes.flat_map(|(node, &ranks)| std::iter::repeat_n(node, ranks as usize)).collect()
}

/// "4 on one node", "8 on 2 nodes (3 + 5)".
pub fn shape_words(nodes: &[u32]) -> String {
    let sizes: Vec<String> = nodes.iter().map(u32::to_string).collect();
    match nodes {
        [ranks] => format!("{ranks} on one node"),
        _ => format!("{} on {} nodes ({})", nodes.iter().sum::<u32>(), nodes.len(), sizes.join(" + ")),
    }
}

fn within_rank_numbers(ranks: u64) -> Result<(), ShapeError> {
    const MAX: u32 = 1 << 16;
    if ranks > MAX.into() { Err(ShapeError::TooManyRanks { ranks, max: MAX }) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_number_is_the_size_of_every_node() {
        assert_eq!(node_sizes(Some(3), &[2]).unwrap(), [2, 2, 2]);
        assert_eq!(node_sizes(None, &[8]).unwrap(), [8]);
    }

    #[test]
    fn a_list_gives_nodes_of_different_size() {
        assert_eq!(node_sizes(None, &[3, 5]).unwrap(), [3, 5]);
        assert_eq!(node_sizes(Some(2), &[3, 5]).unwrap(), [3, 5]);
        let error = node_sizes(Some(3), &[3, 5]).unwrap_err();
        assert!(matches!(error, ShapeError::NodesDiffer { listed: 2, nodes: 3 }), "{error}");
    }

    #[test]
    fn empty_nodes_and_absurd_worlds_are_refused() {
        assert!(matches!(node_sizes(Some(0), &[4]), Err(ShapeError::Zero { option: "--nodes" })));
        assert!(matches!(node_sizes(None, &[4, 0]), Err(ShapeError::Zero { option: "--ranks-per-node" })));
        for (nodes, list) in [(Some(u32::MAX), vec![u32::MAX]), (None, vec![u32::MAX; 2])] {
            assert!(matches!(node_sizes(nodes, &list), Err(ShapeError::TooManyRanks { .. })));
        }
    }
}
