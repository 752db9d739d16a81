//! The pages that the kernel really granted. Requests for huge pages are advice: only the grant
//! counts.

use super::{PeerMapping, Segment};

/// Bytes of shared huge pages behind the mappings of this process, from `/proc/self/smaps_rollup`;
/// `None` where the kernel does not report them.
pub fn shared_huge_bytes() -> Option<u64> {
    parse(&std::fs::read_to_string("/proc/self/smaps_rollup").ok()?)
}

fn parse(smaps: &str) -> Option<u64> {
    let line = smaps.lines().find_map(|line| line.strip_prefix("ShmemPmdMapped:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

/// Requests a small heap on huge pages and checks whether it got them. `None` where the kernel does
/// not report it.
pub fn huge_pages_granted() -> Option<bool> {
    let segment = Segment::create("sidelane-probe", 4 << 20).ok()?;
    let before = shared_huge_bytes()?;
    let mapped = PeerMapping::new(&[Some(&segment)]).ok()?;
    mapped.populate(0, 0, segment.len()).ok()?;
    Some(shared_huge_bytes()? > before)
}

/// Pages that a heap got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageReport {
    /// Bytes of the heap.
    pub bytes: u64,
    /// Of them (and of other shared mappings of this process) on huge pages; `None` if unknown.
    pub huge: Option<u64>,
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn the_grant_is_read_not_the_request() {
        assert_eq!(parse("Rss: 12 kB\nShmemPmdMapped:     4096 kB\n"), Some(4096 * 1024));
        assert_eq!(parse("Rss: 12 kB\n"), None);
    }
}
