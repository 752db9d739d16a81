//! Kernel, cores, vector units, memory, NUMA nodes, limits and variables of this process.

use sidelane::error::BootstrapError;

use super::finding::{Finding, seen};
use super::machine::{Facts, Root};
use crate::table::bytes;

pub fn kernel(root: &Root) -> Finding {
    match root.read("/proc/sys/kernel/osrelease") {
        Some(release) => {
            seen(format!("Linux {release}")).means("memfd, futex and descriptor passing are there.")
        }
        None => seen("unknown")
            .means("/proc is not readable; the host lanes need Linux.")
            .warn("Mount /proc, or run on Linux."),
    }
}

pub fn cores(root: &Root, facts: &Facts) -> Finding {
    let usable = facts.usable_cores;
    match root.read("/sys/devices/system/cpu/online").as_deref().and_then(count_ranges) {
        Some(online) if online > usable => seen(format!("{usable} usable of {online}"))
            .means("An affinity mask or a control group keeps this process from the rest.")
            .note("With fewer cores than ranks the ranks take turns: widen the mask or the quota."),
        _ => seen(format!("{usable} usable")).means("With fewer cores than ranks the ranks take turns."),
    }
}

pub fn vectors(root: &Root) -> Finding {
    let info = root.read("/proc/cpuinfo").unwrap_or_default();
    let flags = info.lines().find(|line| line.starts_with("flags")).unwrap_or_default();
    let has = |flag| flags.split_whitespace().any(|word| word == flag);
    if has("avx512f") {
        seen("AVX-512").means("The widest loops for copying and summing rows are used.")
    } else if has("avx2") {
        seen("AVX2").means("Vector loops with streaming stores are used.")
    } else {
        seen("portable")
            .means("Rows are copied and summed by portable loops; results are the same bits.")
            .note("Nothing, on this processor; in a virtual machine pass the host's CPU model through.")
    }
}

pub fn memory(root: &Root) -> Finding {
    let (Some(total), Some(available)) = (meminfo(root, "MemTotal"), meminfo(root, "MemAvailable")) else {
        return seen("unknown").means("/proc/meminfo is not readable.").note("Mount /proc.");
    };
    let found = format!("{} free of {}", bytes(available), bytes(total));
    match memory_limit(root).filter(|&limit| limit < total) {
        Some(limit) => seen(format!("{found}, limited to {}", bytes(limit)))
            .means("A control group limits this process; shared segments count against it.")
            .note("Size the heaps of all ranks of this machine below the limit, or raise it."),
        None => seen(found).means("The heaps of all ranks of this machine must fit in what is free."),
    }
}

pub fn numa(root: &Root) -> Finding {
    match root.numbered("/sys/devices/system/node", "node") {
        0 => seen("not reported").means("Memory is taken as one node."),
        1 => seen("1").means("All memory is equally near."),
        more => seen(more.to_string())
            .means("Pages lie where they are touched first; rows that cross nodes are slower.")
            .note("Bind each rank to one node, for example with numactl --cpunodebind=N --membind=N."),
    }
}

/// Bytes that a control group lets this process and its children have, if it sets a limit.
fn memory_limit(root: &Root) -> Option<u64> {
    ["/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"]
        .iter()
        .find_map(|path| root.read(path)?.parse().ok())
}

/// Bytes that new processes can take before the kernel kills one, if /proc is readable. The use of
/// a control group is not subtracted: it counts cached files, which the kernel drops first.
pub fn available_memory(root: &Root) -> Option<u64> {
    let free = meminfo(root, "MemAvailable")?;
    Some(memory_limit(root).map_or(free, |limit| free.min(limit)))
}

/// A value of /proc/meminfo, in bytes, or a plain count for lines without a unit.
pub fn meminfo(root: &Root, key: &str) -> Option<u64> {
    let text = root.read("/proc/meminfo")?;
    let mut words =
        text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?.split_whitespace();
    let value: u64 = words.next()?.parse().ok()?;
    Some(if words.next() == Some("kB") { value * 1024 } else { value })
}

fn count_ranges(list: &str) -> Option<usize> {
    list.split(',')
        .map(|range| {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            let (first, last) = (first.parse::<usize>().ok()?, last.parse::<usize>().ok()?);
            (last + 1).checked_sub(first)
        })
        .sum()
}

/// Pages that shared segments get. A setting is only a promise, which fragmented memory may break,
/// so a real segment is allocated.
pub fn huge_pages(root: &Root, facts: &Facts) -> Finding {
    const SETTING: &str = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
    let setting = root.read(SETTING).as_deref().and_then(chosen).unwrap_or("absent".into());
    let reserved = meminfo(root, "HugePages_Total").unwrap_or(0);
    let grant = match facts.huge_pages {
        Some(true) => "granted",
        Some(false) => "not granted",
        None => "grant unknown",
    };
    let found = format!("{grant}; shmem_enabled = {setting}, {reserved} reserved");
    match (facts.huge_pages, setting.as_str()) {
        (Some(true), _) => seen(found).means("A segment asked for huge pages and got them."),
        (_, "absent") => seen(found)
            .means("This kernel has no huge pages for shared memory: rows cost more TLB misses.")
            .note("Boot a kernel with CONFIG_TRANSPARENT_HUGEPAGE."),
        (_, "always" | "force" | "within_size" | "advise") => seen(found)
            .means("The setting allows them, but a segment that asked got none: memory may be fragmented.")
            .note("As root: echo 1 > /proc/sys/vm/compact_memory, then try again."),
        _ => seen(found)
            .means("Segments lie in small pages: first touches are slow, rows cost more TLB misses.")
            .note("As root: echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled"),
    }
}

/// `always [never] force` chooses `never`.
fn chosen(setting: &str) -> Option<String> {
    let (_, rest) = setting.split_once('[')?;
    Some(rest.split_once(']')?.0.to_owned())
}

pub fn dev_shm(root: &Root) -> Finding {
    const ENOUGH: u64 = 1 << 30;
    match rustix::fs::statvfs(root.join("/dev/shm")) {
        Ok(space) if space.f_blocks * space.f_frsize >= ENOUGH => {
            seen(format!("{} free", bytes(space.f_bavail * space.f_frsize)))
                .means("Sidelane's own segments are anonymous and do not lie here; NCCL and PyTorch use it.")
        }
        Ok(space) => seen(bytes(space.f_blocks * space.f_frsize))
            .means("Sidelane's own segments do not lie here, but NCCL and PyTorch fail when it is full.")
            .note("In a container: --shm-size=8g, or --ipc=host."),
        Err(_) => seen("absent")
            .means("Sidelane's own segments do not lie here, but NCCL and PyTorch need it.")
            .note("Mount a tmpfs at /dev/shm."),
    }
}

pub fn open_files(facts: &Facts) -> Finding {
    const ENOUGH: u64 = 4096;
    let found = facts.open_files.map_or("unlimited".to_owned(), |limit| limit.to_string());
    if facts.open_files.is_none_or(|limit| limit >= ENOUGH) {
        seen(found).means("Enough for the sockets and segments of a large job.")
    } else {
        seen(found)
            .means("A rank holds a few descriptors per peer: large jobs run out.")
            .note("ulimit -n 65536 before the job starts, or raise nofile in limits.conf.")
    }
}

/// A limit of locked memory, and what it leaves for each NIC of a rank.
fn for_each_nic(limit: u64, facts: &Facts) -> String {
    let nics = facts.nics.iter().flat_map(|survey| &survey.ranks).map(Vec::len).max().unwrap_or(1);
    match nics {
        0 | 1 => bytes(limit),
        nics => format!("{}, so {} for each of {nics} NICs", bytes(limit), bytes(limit / nics as u64)),
    }
}

pub fn locked_memory(facts: &Facts, has_nics: bool) -> Finding {
    match facts.locked_memory {
        None => seen("unlimited").means("NICs can register any heap."),
        Some(limit) if has_nics => seen(for_each_nic(limit, facts))
            .means("Registering memory locks it, once for each NIC: heaps of a node that are larger fail.")
            .warn("ulimit -l unlimited, memlock in limits.conf, or --ulimit memlock=-1 for a container."),
        Some(limit) => seen(bytes(limit)).means("Matters only to NICs, which lock registered memory."),
    }
}

pub fn variables(facts: &Facts) -> Finding {
    let unknown = &facts.unknown_variables;
    if unknown.is_empty() {
        return seen("names are known").means("Each SIDELANE_ variable that is set has a reader.");
    }
    let meant = unknown.iter().map(|variable| match &variable.refusal {
        Some(
            BootstrapError::RenamedVariable { new: near, .. } | BootstrapError::MisspeltVariable { near, .. },
        ) => {
            format!("{} ({near}?)", variable.name)
        }
        _ => variable.name.clone(),
    });
    let found = seen(meant.collect::<Vec<_>>().join(", "));
    match unknown.iter().any(|variable| variable.refusal.is_some()) {
        true => found.means("Ranks refuse an old or misspelt name.").warn("Rename or unset it."),
        false => found
            .means("No rank reads it.")
            .note("Nothing, if it is another tool's: docs/environment.md lists the names."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_of_cores_are_counted() {
        assert_eq!(count_ranges("0-3,8,10-11"), Some(7));
        assert_eq!(count_ranges("0"), Some(1));
        assert_eq!(count_ranges("3-1"), None);
        assert_eq!(count_ranges(""), None);
    }
}
