//! The host lists of SLURM: `node[03-05,09],x1` is node03, node04, node05, node09, x1.

/// The first host of a list. None if the list is empty or its brackets are broken.
pub(super) fn first_host(list: &str) -> Option<String> {
    let list = list.trim();
    let mut host = String::new();
    let mut rest = list;
    loop {
        match rest.find(['[', ']', ',']) {
            None => host.push_str(rest),
            Some(at) => {
                host.push_str(&rest[..at]);
                match rest.as_bytes()[at] {
                    b'[' => {
                        let (inside, after) = rest[at + 1..].split_once(']')?;
                        let range = inside.split(',').next()?;
                        let first = range.split('-').next()?;
                        if first.is_empty() || !first.bytes().all(|byte| byte.is_ascii_digit()) {
                            return None;
                        }
                        host.push_str(first);
                        rest = after;
                        continue;
                    }
                    b',' => {}
                    _ => return None,
                }
            }
        }
        return (!host.is_empty()).then_some(host);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_host_comes_out_of_brackets() {
        for (list, first) in [
            ("node[03-05,09],x1", "node03"),
            ("x1,node[03-05,09]", "x1"),
            ("x1", "x1"),
            ("gpu-a[7]", "gpu-a7"),
            ("rack[1-2]n[001-004].cluster", "rack1n001.cluster"),
            (" head.example.org ", "head.example.org"),
        ] {
            assert_eq!(first_host(list).as_deref(), Some(first), "{list}");
        }
        for broken in ["", ",a", "node[", "node[]", "node[a-b]", "node]1"] {
            assert_eq!(first_host(broken), None, "{broken:?}");
        }
    }
}
