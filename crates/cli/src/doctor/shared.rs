//! What shared segments and their descriptors run into: huge pages, /dev/shm, limits.

use super::facts::Facts;
use super::finding::{Finding, bytes};
use super::host::meminfo;
use super::root::Root;

/// What shared segments get. A setting is a promise: fragmented memory may refuse it, so a segment is asked for.
pub fn huge_pages(root: &Root, facts: &Facts) -> Finding {
    const WHAT: &str = "huge pages (shared)";
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
        (Some(true), _) => Finding::ok(WHAT, found, "A segment asked for huge pages and got them."),
        (_, "absent") => Finding::note(
            WHAT,
            found,
            "This kernel has no huge pages for shared memory: rows cost more TLB misses.",
            "Boot a kernel with CONFIG_TRANSPARENT_HUGEPAGE.",
        ),
        (_, "always" | "force" | "within_size" | "advise") => Finding::note(
            WHAT,
            found,
            "The setting allows them, but a segment that asked got none: memory may be fragmented.",
            "As root: echo 1 > /proc/sys/vm/compact_memory, then try again.",
        ),
        _ => Finding::note(
            WHAT,
            found,
            "Segments lie in small pages: first touches are slow, rows cost more TLB misses.",
            "As root: echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled",
        ),
    }
}

/// `always [never] force` chooses `never`.
fn chosen(setting: &str) -> Option<String> {
    let (_, rest) = setting.split_once('[')?;
    Some(rest.split_once(']')?.0.to_owned())
}

pub fn dev_shm(root: &Root) -> Finding {
    const WHAT: &str = "/dev/shm";
    const ENOUGH: u64 = 1 << 30;
    match rustix::fs::statvfs(root.join("/dev/shm")) {
        Ok(space) if space.f_blocks * space.f_frsize >= ENOUGH => Finding::ok(
            WHAT,
            format!("{} free", bytes(space.f_bavail * space.f_frsize)),
            "Sidelane's own segments are anonymous and do not lie here; NCCL and PyTorch use it.",
        ),
        Ok(space) => Finding::note(
            WHAT,
            bytes(space.f_blocks * space.f_frsize),
            "Sidelane's own segments do not lie here, but NCCL and PyTorch fail when it is full.",
            "In a container: --shm-size=8g, or --ipc=host.",
        ),
        Err(_) => Finding::note(
            WHAT,
            "absent",
            "Sidelane's own segments do not lie here, but NCCL and PyTorch need it.",
            "Mount a tmpfs at /dev/shm.",
        ),
    }
}

pub fn open_files(facts: &Facts) -> Finding {
    const WHAT: &str = "open files";
    const ENOUGH: u64 = 4096;
    let found = facts.open_files.map_or("unlimited".to_owned(), |limit| limit.to_string());
    if facts.open_files.is_none_or(|limit| limit >= ENOUGH) {
        Finding::ok(WHAT, found, "Enough for the sockets and segments of a large job.")
    } else {
        Finding::note(
            WHAT,
            found,
            "A rank holds a few descriptors per peer: large jobs run out.",
            "ulimit -n 65536 before the job starts, or raise nofile in limits.conf.",
        )
    }
}

pub fn locked_memory(facts: &Facts, has_cards: bool) -> Finding {
    const WHAT: &str = "locked memory";
    match facts.locked_memory {
        None => Finding::ok(WHAT, "unlimited", "Cards can register any heap."),
        Some(limit) if has_cards => Finding::warn(
            WHAT,
            bytes(limit),
            "Registering memory with a card locks it: a heap larger than this fails.",
            "ulimit -l unlimited, memlock in limits.conf, or --ulimit memlock=-1 for a container.",
        ),
        Some(limit) => {
            Finding::ok(WHAT, bytes(limit), "Matters only to cards, which lock what they register.")
        }
    }
}
