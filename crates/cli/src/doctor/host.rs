//! Kernel, cores, vector units, memory, NUMA nodes.

use super::facts::Facts;
use super::finding::{Finding, bytes};
use super::root::Root;

pub fn kernel(root: &Root) -> Finding {
    const WHAT: &str = "kernel";
    match root.read("/proc/sys/kernel/osrelease") {
        Some(release) => {
            Finding::ok(WHAT, format!("Linux {release}"), "memfd, futex and descriptor passing are there.")
        }
        None => Finding::warn(
            WHAT,
            "unknown",
            "/proc is not readable; the host lanes need Linux.",
            "Mount /proc, or run on Linux.",
        ),
    }
}

pub fn cores(root: &Root, facts: &Facts) -> Finding {
    const WHAT: &str = "cores";
    let usable = facts.usable_cores;
    match root.read("/sys/devices/system/cpu/online").as_deref().and_then(count_ranges) {
        Some(online) if online > usable => Finding::note(
            WHAT,
            format!("{usable} usable of {online}"),
            "An affinity mask or a control group keeps this process from the rest.",
            "With fewer cores than ranks the ranks take turns: widen the mask or the quota.",
        ),
        _ => {
            Finding::ok(WHAT, format!("{usable} usable"), "With fewer cores than ranks the ranks take turns.")
        }
    }
}

pub fn vectors(root: &Root) -> Finding {
    const WHAT: &str = "vector unit";
    let info = root.read("/proc/cpuinfo").unwrap_or_default();
    let flags = info.lines().find(|line| line.starts_with("flags")).unwrap_or_default();
    let has = |flag| flags.split_whitespace().any(|word| word == flag);
    if has("avx512f") {
        Finding::ok(WHAT, "AVX-512", "The widest loops for copying and summing rows are used.")
    } else if has("avx2") {
        Finding::ok(WHAT, "AVX2", "Vector loops with streaming stores are used.")
    } else {
        Finding::note(
            WHAT,
            "portable",
            "Rows are copied and summed by portable loops; results are the same bits.",
            "Nothing, on this processor; in a virtual machine pass the host's CPU model through.",
        )
    }
}

pub fn memory(root: &Root) -> Finding {
    const WHAT: &str = "memory";
    let (Some(total), Some(available)) = (meminfo(root, "MemTotal"), meminfo(root, "MemAvailable")) else {
        return Finding::note(WHAT, "unknown", "/proc/meminfo is not readable.", "Mount /proc.");
    };
    let limit = ["/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"]
        .iter()
        .find_map(|path| root.read(path)?.parse::<u64>().ok())
        .filter(|&limit| limit < total);
    let found = format!("{} free of {}", bytes(available), bytes(total));
    match limit {
        Some(limit) => Finding::note(
            WHAT,
            format!("{found}, limited to {}", bytes(limit)),
            "A control group limits this process; shared segments count against it.",
            "Size the heaps of all ranks of this machine below the limit, or raise it.",
        ),
        None => Finding::ok(WHAT, found, "The heaps of all ranks of this machine must fit in what is free."),
    }
}

pub fn numa(root: &Root) -> Finding {
    const WHAT: &str = "NUMA nodes";
    match root.numbered("/sys/devices/system/node", "node") {
        0 => Finding::ok(WHAT, "not reported", "Memory is taken as one node."),
        1 => Finding::ok(WHAT, "1", "All memory is equally near."),
        more => Finding::note(
            WHAT,
            more.to_string(),
            "Pages lie where they are touched first; rows that cross nodes are slower.",
            "Bind each rank to one node, for example with numactl --cpunodebind=N --membind=N.",
        ),
    }
}

/// A value of /proc/meminfo, in bytes, or a plain count for lines without a unit.
pub fn meminfo(root: &Root, key: &str) -> Option<u64> {
    let text = root.read("/proc/meminfo")?;
    let mut words =
        text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?.split_whitespace();
    let value: u64 = words.next()?.parse().ok()?;
    Some(if words.next() == Some("kB") { value * 1024 } else { value })
}

/// How many numbers a list like `0-3,8,10-11` holds.
fn count_ranges(list: &str) -> Option<usize> {
    list.split(',')
        .map(|range| {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            let (first, last) = (first.parse::<usize>().ok()?, last.parse::<usize>().ok()?);
            (last + 1).checked_sub(first)
        })
        .sum()
}

#[cfg(test)]
mod tests {
    use super::count_ranges;

    #[test]
    fn ranges_of_cores_are_counted() {
        assert_eq!(count_ranges("0-3,8,10-11"), Some(7));
        assert_eq!(count_ranges("0"), Some(1));
        assert_eq!(count_ranges("3-1"), None);
        assert_eq!(count_ranges(""), None);
    }
}
