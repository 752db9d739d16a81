//! How many ranks on how many nodes.

use crate::error::{CliError, usage};

/// Number of ranks of each node.
pub fn node_sizes(nodes: Option<u32>, ranks_per_node: &[u32]) -> Result<Vec<u32>, CliError> {
    let sizes = match (nodes, ranks_per_node) {
        (Some(0), _) => return Err(usage!("--nodes must be at least 1")),
        (Some(nodes), [each]) => {
            within_rank_numbers(u64::from(nodes) * u64::from(*each))?;
            vec![*each; nodes as usize]
        }
        (Some(nodes), list) if nodes as usize != list.len() => {
            return Err(usage!(
                "--ranks-per-node lists {listed} nodes, but --nodes is {nodes}",
                listed = list.len()
            ));
        }
        (_, list) => list.to_vec(),
    };
    if sizes.contains(&0) {
        return Err(usage!("--ranks-per-node must be at least 1"));
    }
    within_rank_numbers(sizes.iter().map(|&size| u64::from(size)).sum())?;
    Ok(sizes)
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

fn within_rank_numbers(ranks: u64) -> Result<(), CliError> {
    const MAX: u32 = 1 << 16;
    if ranks > MAX.into() {
        Err(usage!("{ranks} ranks are too many: at most {max}", max = MAX))
    } else {
        Ok(())
    }
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
        let refused = node_sizes(Some(3), &[3, 5]).unwrap_err().to_string();
        assert_eq!(refused, "--ranks-per-node lists 2 nodes, but --nodes is 3");
    }

    #[test]
    fn empty_nodes_and_absurd_worlds_are_refused() {
        for (nodes, list, said) in [
            (Some(0), vec![4], "--nodes must be at least 1"),
            (None, vec![4, 0], "--ranks-per-node must be at least 1"),
            (Some(u32::MAX), vec![u32::MAX], "ranks are too many: at most 65536"),
            (None, vec![u32::MAX; 2], "ranks are too many: at most 65536"),
        ] {
            let refused = node_sizes(nodes, &list).unwrap_err().to_string();
            assert!(refused.ends_with(said), "{refused}");
        }
    }
}
