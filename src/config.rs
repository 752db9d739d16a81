//! Settings of a world, read from the environment once.
//!
//! `docs/environment.md` has a table of all variables, with their defaults.

use std::net::IpAddr;
use std::num::NonZeroU64;
use std::time::Duration;

use sidelane_core::with_methods;

use crate::error::BootstrapError;

/// What joins nodes (`SIDELANE_NET`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum NetChoice {
    /// Loopback if all ranks are on one machine; otherwise verbs if all ranks have NICs, and tcp if
    /// not.
    #[default]
    Auto,
    /// Shared segments between ranks of one machine that act as different nodes.
    Loopback,
    /// NICs, by libibverbs.
    Verbs,
    /// Connections between any machines.
    Tcp,
}

impl NetChoice {
    /// All choices.
    pub const ALL: [NetChoice; 4] = [NetChoice::Auto, NetChoice::Verbs, NetChoice::Tcp, NetChoice::Loopback];

    /// Its name in the environment and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            NetChoice::Auto => "auto",
            NetChoice::Loopback => "loopback",
            NetChoice::Verbs => "verbs",
            NetChoice::Tcp => "tcp",
        }
    }

    /// From this process's environment.
    ///
    /// # Errors
    /// [`BootstrapError::BadVariable`].
    pub fn from_env() -> Result<Self, BootstrapError> {
        let Ok(value) = std::env::var("SIDELANE_NET") else { return Ok(NetChoice::Auto) };
        let found = Self::ALL.into_iter().find(|choice| choice.name() == value);
        let (name, expected) = ("SIDELANE_NET", "auto, verbs, tcp, loopback");
        found.ok_or(BootstrapError::BadVariable { name, value, expected })
    }
}

/// A link that connections within a machine emulate (`SIDELANE_EMULATED_LINK`), so that overlap
/// with compute can be measured without such a link. Bytes move at once; signals come when the link
/// would have delivered them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[non_exhaustive]
pub struct EmulatedLink {
    /// Bytes that a rank sends per second, to all others together.
    pub bytes_per_second: NonZeroU64,
    /// From the last byte sent to the signal seen.
    pub latency: Duration,
}

impl EmulatedLink {
    /// A link of so many bytes per second, over which a signal takes so long.
    pub const fn new(bytes_per_second: NonZeroU64, latency: Duration) -> Self {
        EmulatedLink { bytes_per_second, latency }
    }

    /// Reads bytes per second, `/`, microseconds.
    pub fn parse(text: &str) -> Option<Self> {
        let (bytes, micros) = text.split_once('/')?;
        let bytes_per_second = NonZeroU64::new(parse_bytes(bytes)?)?;
        Some(EmulatedLink { bytes_per_second, latency: Duration::from_micros(micros.trim().parse().ok()?) })
    }

    /// From this process's environment; an empty one is none.
    ///
    /// # Errors
    /// [`BootstrapError::BadVariable`].
    pub fn from_env() -> Result<Option<Self>, BootstrapError> {
        let value = std::env::var("SIDELANE_EMULATED_LINK").unwrap_or_default();
        if value.is_empty() {
            return Ok(None);
        }
        let expected = "bytes per second (K, M, G), a slash and microseconds";
        match Self::parse(&value) {
            Some(link) => Ok(Some(link)),
            None => Err(BootstrapError::BadVariable { name: "SIDELANE_EMULATED_LINK", value, expected }),
        }
    }
}

/// Address at which connected peers reach this rank over the tcp lane (`SIDELANE_TCP_ADDRESS`).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum TcpAddress {
    /// At all addresses of this machine; at loopback, if the ranks meet there.
    #[default]
    Any,
    /// At this address.
    Ip(IpAddr),
    /// At the address of this interface.
    Interface(String),
}

impl TcpAddress {
    /// From this process's environment. The first use checks that the address or interface exists.
    pub fn from_env() -> Self {
        let value = std::env::var("SIDELANE_TCP_ADDRESS").unwrap_or_default();
        match value.parse() {
            Ok(ip) => TcpAddress::Ip(ip),
            Err(_) if value.is_empty() => TcpAddress::Any,
            Err(_) => TcpAddress::Interface(value),
        }
    }
}

impl std::fmt::Display for TcpAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            TcpAddress::Any => Ok(()),
            TcpAddress::Ip(ip) => ip.fmt(f),
            TcpAddress::Interface(name) => name.fmt(f),
        }
    }
}

/// Sizes of a world's memory, in bytes. Heap and symmetric part must be equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[non_exhaustive]
pub struct Config {
    /// The heap of each rank.
    pub heap: u64,
    /// Its symmetric part: control and callers' windows. The rest is the receive pool.
    pub symmetric: u64,
    /// The cache that the ranks of a node share.
    pub cache: u64,
}

impl Default for Config {
    fn default() -> Self {
        Config { heap: 256 << 20, symmetric: 32 << 20, cache: last_level_cache() }
    }
}

impl Config {
    with_methods! {
        with_heap(heap: u64),
        with_symmetric(symmetric: u64),
        with_cache(cache: u64),
    }

    /// The defaults, changed by what `lookup` knows.
    ///
    /// # Errors
    /// [`BootstrapError::BadVariable`], [`BootstrapError::NoRoomForRows`].
    pub fn from_vars(lookup: &dyn Fn(&str) -> Option<String>) -> Result<Self, BootstrapError> {
        let mut config = Config::default();
        for (name, field) in [
            ("SIDELANE_HEAP", &mut config.heap),
            ("SIDELANE_SYMMETRIC", &mut config.symmetric),
            ("SIDELANE_CACHE", &mut config.cache),
        ] {
            if let Some(value) = lookup(name) {
                let expected = "bytes, or a number with K, M or G";
                *field = parse_bytes(&value).ok_or(BootstrapError::BadVariable { name, value, expected })?;
            }
        }
        config.check()?;
        Ok(config)
    }

    /// Checks that the symmetric part leaves room for rows.
    ///
    /// # Errors
    /// [`BootstrapError::NoRoomForRows`].
    pub fn check(&self) -> Result<(), BootstrapError> {
        let Config { heap, symmetric, .. } = *self;
        if symmetric < heap { Ok(()) } else { Err(BootstrapError::NoRoomForRows { heap, symmetric }) }
    }

    /// From this process's environment.
    ///
    /// # Errors
    /// As [`Config::from_vars`]; [`BootstrapError::RenamedVariable`] and
    /// [`BootstrapError::MisspeltVariable`] for any variable that has such a name.
    pub fn from_env() -> Result<Self, BootstrapError> {
        check_names(std::env::vars_os().filter_map(|(name, _)| name.into_string().ok()))?;
        Self::from_vars(&|name| std::env::var(name).ok())
    }
}

/// The names of Sidelane's variables begin with this.
const PREFIX: &str = "SIDELANE_";

/// Variables that the library reads.
const OF_THE_LIBRARY: [&str; 41] = [
    "SIDELANE_CACHE",
    "SIDELANE_CUBLAS_LIBRARY",
    "SIDELANE_CUDA_LIBRARY",
    "SIDELANE_CUPTI_LIBRARY",
    "SIDELANE_DEADLINE_MS",
    "SIDELANE_EMULATED_LINK",
    "SIDELANE_HEAP",
    "SIDELANE_IBVERBS_LIBRARY",
    "SIDELANE_INSECURE",
    "SIDELANE_JOB",
    "SIDELANE_LAUNCHER_FD",
    "SIDELANE_LAUNCHER_PID",
    "SIDELANE_LIVENESS_MS",
    "SIDELANE_NET",
    "SIDELANE_NODE",
    "SIDELANE_PORT",
    "SIDELANE_RENDEZVOUS_MS",
    "SIDELANE_SECRET",
    "SIDELANE_SECRET_FILE",
    "SIDELANE_SIMD",
    "SIDELANE_SITE_PACKAGES",
    "SIDELANE_SYMMETRIC",
    "SIDELANE_TCP_ADDRESS",
    "SIDELANE_VERBS_CHUNK",
    "SIDELANE_VERBS_GID_INDEX",
    "SIDELANE_VERBS_GRACE_MS",
    "SIDELANE_VERBS_IN_FLIGHT",
    "SIDELANE_VERBS_MTU",
    "SIDELANE_VERBS_NICS",
    "SIDELANE_VERBS_PKEY_INDEX",
    "SIDELANE_VERBS_PORT",
    "SIDELANE_VERBS_QUEUE_PAIRS",
    "SIDELANE_VERBS_RELAXED_ORDERING",
    "SIDELANE_VERBS_RETRIES",
    "SIDELANE_VERBS_RNR_RETRIES",
    "SIDELANE_VERBS_SERVICE_LEVEL",
    "SIDELANE_VERBS_SIGNAL",
    "SIDELANE_VERBS_STAGING",
    "SIDELANE_VERBS_SUBNETS",
    "SIDELANE_VERBS_TIMEOUT",
    "SIDELANE_VERBS_TRAFFIC_CLASS",
];

/// Variables of the build, which `cargo run` passes on, and of tests, benchmarks and scripts. A
/// rank inherits them and does not read them.
const OF_BUILD_AND_TESTS: [&str; 15] = [
    "SIDELANE_COMMIT",
    "SIDELANE_GATE_CASES",
    "SIDELANE_MEGATRON_SOURCE",
    "SIDELANE_NEED_BASELINES",
    "SIDELANE_NEED_CMAKE",
    "SIDELANE_NEED_DEVICES",
    "SIDELANE_NEED_MEGATRON",
    "SIDELANE_NEED_NAMESPACES",
    "SIDELANE_NEED_TORCH",
    "SIDELANE_NEED_VALGRIND",
    "SIDELANE_PROGRAM",
    "SIDELANE_PYTHON",
    "SIDELANE_RANDOM_SECONDS",
    "SIDELANE_TARGET",
    "SIDELANE_WRITE_HEADER",
];

/// Variables between tests and their processes begin with these, and those that the fake CUDA
/// driver reads.
const OF_TESTS_BY_PREFIX: [&str; 2] = ["SIDELANE_TEST_", "SIDELANE_FAKE_CUDA_"];

/// A variable with our prefix that this version does not read.
#[doc(hidden)]
#[derive(Clone, Debug, PartialEq)]
pub struct UnknownVariable {
    /// Its name.
    pub name: String,
    /// The error by which worlds refuse an old name, or one that is nearly one of ours: such a
    /// variable would do nothing. Any other name may be another tool's (CMake reads
    /// `SIDELANE_ROOT`) or a later version's.
    pub refusal: Option<BootstrapError>,
}

/// The unknown ones of these variables, by name.
#[doc(hidden)]
pub fn unknown_variables(names: impl IntoIterator<Item = String>) -> Vec<UnknownVariable> {
    let is_known = |name: &str| {
        let by_prefix = OF_TESTS_BY_PREFIX.iter().any(|prefix| name.starts_with(prefix));
        OF_THE_LIBRARY.contains(&name) || OF_BUILD_AND_TESTS.contains(&name) || by_prefix
    };
    let mut unknown: Vec<String> =
        names.into_iter().filter(|name| name.starts_with(PREFIX) && !is_known(name)).collect();
    unknown.sort_unstable();
    let refusal = |name: &String| match RENAMED.into_iter().find(|(old, _)| old == name) {
        Some((name, new)) => Some(BootstrapError::RenamedVariable { name, new }),
        None => nearest(name).map(|near| BootstrapError::MisspeltVariable { name: name.clone(), near }),
    };
    unknown.into_iter().map(|name| UnknownVariable { refusal: refusal(&name), name }).collect()
}

/// Refuses the first unknown variable that has a refusal, and warns of the others.
fn check_names(names: impl IntoIterator<Item = String>) -> Result<(), BootstrapError> {
    for UnknownVariable { name, refusal } in unknown_variables(names) {
        match refusal {
            Some(refusal) => return Err(refusal),
            None => tracing::warn!(name, "no variable of this version of Sidelane: it has no effect"),
        }
    }
    Ok(())
}

/// The variable of the library that a name may be meant to be: it takes changes of at most a third
/// of its characters, as many as in a forgotten `_MS`, or one change.
fn nearest(name: &str) -> Option<&'static str> {
    let word = |name: &str| name[PREFIX.len()..].bytes().collect::<Vec<_>>();
    let tried = OF_THE_LIBRARY.into_iter().map(|known| {
        let (given, known_word) = (word(name), word(known));
        (edits(&given, &known_word), (known_word.len() / 3).max(1), known)
    });
    tried.filter(|(edits, most, _)| edits <= most).min().map(|(.., known)| known)
}

/// The fewest changes from one word to another: a character more, less or other, or two that
/// change places.
fn edits(from: &[u8], to: &[u8]) -> usize {
    let mut table: Vec<Vec<usize>> = vec![(0..=to.len()).collect()];
    for i in 1..=from.len() {
        let mut row = vec![i];
        for j in 1..=to.len() {
            let other = table[i - 1][j - 1] + usize::from(from[i - 1] != to[j - 1]);
            let mut fewest = other.min(table[i - 1][j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && from[i - 1] == to[j - 2] && from[i - 2] == to[j - 1] {
                fewest = fewest.min(table[i - 2][j - 2] + 1);
            }
            row.push(fewest);
        }
        table.push(row);
    }
    table[from.len()][to.len()]
}

/// Variables that have other names now. One that is set would do nothing, so it is an error.
const RENAMED: [(&str, &str); 8] = [
    ("SIDELANE_RAIL", "SIDELANE_NET"),
    ("SIDELANE_PACE", "SIDELANE_EMULATED_LINK"),
    ("SIDELANE_CUDA", "SIDELANE_CUDA_LIBRARY"),
    ("SIDELANE_IBVERBS", "SIDELANE_IBVERBS_LIBRARY"),
    ("SIDELANE_CUPTI", "SIDELANE_CUPTI_LIBRARY"),
    ("SIDELANE_CUBLAS", "SIDELANE_CUBLAS_LIBRARY"),
    ("SIDELANE_VERBS_CARD", "SIDELANE_VERBS_NICS"),
    ("SIDELANE_VERBS_RELAXED", "SIDELANE_VERBS_RELAXED_ORDERING"),
];

/// Reads a number of bytes with an optional suffix K, M or G.
pub(crate) fn parse_bytes(text: &str) -> Option<u64> {
    let text = text.trim();
    let (digits, shift) = match text.as_bytes().last()? {
        b'K' | b'k' => (&text[..text.len() - 1], 10),
        b'M' | b'm' => (&text[..text.len() - 1], 20),
        b'G' | b'g' => (&text[..text.len() - 1], 30),
        _ => (text, 0),
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

fn last_level_cache() -> u64 {
    let size = |level: u32| {
        std::fs::read_to_string(format!("/sys/devices/system/cpu/cpu0/cache/index{level}/size")).ok()
    };
    size(3).or_else(|| size(2)).and_then(|text| parse_bytes(&text)).unwrap_or(16 << 20)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_suffixes_and_checked() {
        let config = Config::from_vars(&|name| (name == "SIDELANE_HEAP").then(|| "2G".to_owned())).unwrap();
        assert_eq!(config.heap, 2 << 30);
        let seen = Config::from_vars(&|name| (name == "SIDELANE_HEAP").then(|| "12 apples".to_owned()));
        assert!(matches!(seen, Err(BootstrapError::BadVariable { name: "SIDELANE_HEAP", .. })));
    }

    #[test]
    fn old_name_of_a_variable_is_refused_by_its_new_one() {
        for (old, new) in RENAMED {
            let error = check_names(["PATH".to_owned(), old.to_owned()]).unwrap_err();
            assert_eq!(error, BootstrapError::RenamedVariable { name: old, new });
        }
        let error = check_names(["SIDELANE_RAIL".to_owned()]).unwrap_err();
        assert_eq!(error.to_string(), "SIDELANE_RAIL is now SIDELANE_NET");
    }

    #[test]
    fn misspelt_variable_is_refused_by_the_nearest_name() {
        for (name, near) in [
            ("SIDELANE_NETT", "SIDELANE_NET"),
            ("SIDELANE_HAEP", "SIDELANE_HEAP"),
            ("SIDELANE_SYMETRIC", "SIDELANE_SYMMETRIC"),
            ("SIDELANE_DEADLINE", "SIDELANE_DEADLINE_MS"),
            ("SIDELANE_SECRETFILE", "SIDELANE_SECRET_FILE"),
            ("SIDELANE_VERBS_NIC", "SIDELANE_VERBS_NICS"),
        ] {
            let error = check_names([name.to_owned()]).unwrap_err();
            assert_eq!(error, BootstrapError::MisspeltVariable { name: name.to_owned(), near });
        }
        let error = check_names(["SIDELANE_NETT".to_owned()]).unwrap_err();
        assert_eq!(error.to_string(), "SIDELANE_NETT is no variable of Sidelane, SIDELANE_NET is");
    }

    #[test]
    fn variables_of_ours_and_those_of_other_tools_are_no_misspelling() {
        let ours = OF_THE_LIBRARY.into_iter().chain(OF_BUILD_AND_TESTS);
        let of_tests = ["SIDELANE_TEST_CASE", "SIDELANE_FAKE_CUDA_SEED"];
        let others = ["ROOT", "DIR", "HOME", "PATH", "BIN", "LIB", "INCLUDE", "VERSION", "PREFIX", "LOG"];
        let others = others.map(|other| format!("{PREFIX}{other}"));
        let names = ours.chain(of_tests).map(str::to_owned).chain(others);
        check_names(names.chain(["SIDELANE".to_owned(), "PATH".to_owned()])).unwrap();
        let unknown = unknown_variables(["SIDELANE_ROOT", "SIDELANE_HEAP", "PATH"].map(str::to_owned));
        assert_eq!(unknown, [UnknownVariable { name: "SIDELANE_ROOT".to_owned(), refusal: None }]);
    }

    #[test]
    fn heap_without_room_for_rows_is_refused() {
        for (name, value) in
            [("SIDELANE_SYMMETRIC", "1024G"), ("SIDELANE_HEAP", "32M"), ("SIDELANE_HEAP", "1K")]
        {
            let seen = Config::from_vars(&|asked| (asked == name).then(|| value.to_owned()));
            assert!(matches!(seen, Err(BootstrapError::NoRoomForRows { .. })), "{name}={value}: {seen:?}");
        }
        let seen = Config::from_vars(&|name| (name == "SIDELANE_HEAP").then(|| "1K".to_owned())).unwrap_err();
        assert_eq!(
            seen.to_string(),
            "a heap of 1024 bytes (SIDELANE_HEAP) has no room for rows next to its symmetric part of 33554432 \
             bytes (SIDELANE_SYMMETRIC)"
        );
    }

    #[test]
    fn emulated_link_is_bytes_and_microseconds() {
        let link = EmulatedLink::parse("2G/5").unwrap();
        assert_eq!((link.bytes_per_second.get(), link.latency), (2 << 30, Duration::from_micros(5)));
        for nonsense in ["2G", "0/5", "2G/-1", "fast/5", "/", ""] {
            assert_eq!(EmulatedLink::parse(nonsense), None, "{nonsense}");
        }
    }
}
