//! Settings of the verbs lane, read from the environment once. `docs/verbs.md` has the table of
//! variables, with defaults and reasons.

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use super::nic::Mtu;
use super::reach::Subnet;
use crate::config::parse_bytes;
use crate::error::BootstrapError;

/// How a signal travels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SignalMode {
    /// A write of the flag's line, behind the data: for NICs that place writes in order.
    Write,
    /// An atomic addition, behind the data.
    FetchAdd,
    /// A number that comes with the data's last write, or with a write of no bytes.
    Immediate,
}

impl SignalMode {
    /// All ways.
    pub const ALL: [SignalMode; 3] = [SignalMode::Write, SignalMode::FetchAdd, SignalMode::Immediate];

    /// Its name in the environment.
    pub const fn name(self) -> &'static str {
        match self {
            SignalMode::Write => "write",
            SignalMode::FetchAdd => "fetch-add",
            SignalMode::Immediate => "immediate",
        }
    }

    /// The name of a setting: none is the choice of the NICs.
    pub const fn setting(mode: Option<Self>) -> &'static str {
        match mode {
            Some(mode) => mode.name(),
            None => AUTO,
        }
    }
}

/// In the environment: as the NICs of both ends allow.
const AUTO: &str = "auto";

/// The table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Where libibverbs lies, if not where the loader looks.
    pub library: Option<PathBuf>,
    /// The NICs to use, in order; empty: the nearest.
    pub nics: Vec<String>,
    /// The GPUs that CUDA shows this process, as `CUDA_VISIBLE_DEVICES` lists them; none: all.
    pub visible_gpus: Option<String>,
    /// The port of each NIC; none: the first active one.
    pub port: Option<u8>,
    /// Place of the address in the port's table.
    pub gid_index: Option<u8>,
    /// Subnets of which the address is, the best first; empty: any.
    pub subnets: Vec<Subnet>,
    /// Place of the partition key; none: the first of a full member.
    pub pkey_index: Option<u16>,
    /// Lane of InfiniBand switches, priority on Ethernet.
    pub service_level: u8,
    /// DSCP and ECN of RoCE v2.
    pub traffic_class: u8,
    /// An answer may take 4.096 us * 2^timeout.
    pub timeout: u8,
    /// Number of retries of unanswered requests.
    pub retries: u8,
    /// How long a port may be down; none: as long as retries allow ([`Settings::grace`]).
    pub grace: Option<Duration>,
    /// How often what meets no receive is sent again; 7 is for ever.
    pub rnr_retries: u8,
    /// The largest packet; none: the port's.
    pub mtu: Option<Mtu>,
    /// Bytes of one write.
    pub chunk: u64,
    /// Bytes in flight on one queue pair.
    pub in_flight: u64,
    /// Bytes of staging on each NIC, at most, for all peers.
    pub staging: u64,
    /// Queue pairs to one peer.
    pub queue_pairs: u8,
    /// How a signal travels; none: as the NICs of both ends allow.
    pub signal: Option<SignalMode>,
    /// Whether data may pass data; none: where libibverbs knows how.
    pub relaxed: Option<bool>,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            library: None,
            nics: Vec::new(),
            visible_gpus: None,
            port: None,
            gid_index: None,
            subnets: Vec::new(),
            pkey_index: None,
            service_level: 0,
            traffic_class: 0,
            timeout: 18,
            retries: 6,
            grace: None,
            rnr_retries: 7,
            mtu: None,
            chunk: 256 << 10,
            in_flight: 4 << 20,
            staging: 16 << 20,
            queue_pairs: 1,
            signal: None,
            relaxed: None,
        }
    }
}

/// The longest outage of a port that ends by itself: a flap.
const FLAP: Duration = Duration::from_secs(5);

/// A chunk is a length of 32 bits in a work request, and worth its request.
const CHUNKS: RangeInclusive<u64> = 4 << 10..=1 << 30;

/// Queue pairs to one peer.
pub const QUEUE_PAIRS: RangeInclusive<u8> = 1..=8;

impl Settings {
    /// The defaults, changed by what `lookup` knows. A variable that is set to nothing is not set.
    ///
    /// # Errors
    /// [`BootstrapError::BadVariable`].
    fn from_vars(lookup: &dyn Fn(&str) -> Option<String>) -> Result<Self, BootstrapError> {
        let vars = Vars(lookup);
        let usual = Settings::default();
        let chunk = vars.bytes("SIDELANE_VERBS_CHUNK", CHUNKS, "bytes, 4K to 1G")?.unwrap_or(usual.chunk);
        let in_flight =
            vars.bytes("SIDELANE_VERBS_IN_FLIGHT", chunk..=u64::MAX, "bytes from SIDELANE_VERBS_CHUNK on")?;
        // A slot is two chunks, and one is left to other peers.
        let slots = 4 * chunk;
        let staging = vars.bytes(
            "SIDELANE_VERBS_STAGING",
            slots..=slots.max(64 << 30),
            "bytes, from four of SIDELANE_VERBS_CHUNK to 64G",
        )?;
        Ok(Settings {
            library: vars.text("SIDELANE_IBVERBS_LIBRARY").map(PathBuf::from),
            nics: vars.nics()?,
            // Set to nothing, it hides all GPUs.
            visible_gpus: lookup("CUDA_VISIBLE_DEVICES"),
            port: vars.number("SIDELANE_VERBS_PORT", 1..=254, "a port, from 1")?,
            gid_index: vars.number(
                "SIDELANE_VERBS_GID_INDEX",
                0..=255,
                "a place in the port's table, 0 to 255",
            )?,
            subnets: vars.subnets()?,
            pkey_index: vars.number(
                "SIDELANE_VERBS_PKEY_INDEX",
                0..=u16::MAX,
                "a place in the port's table, 0 to 65535",
            )?,
            service_level: vars
                .number("SIDELANE_VERBS_SERVICE_LEVEL", 0..=15, "0 to 15")?
                .unwrap_or(usual.service_level),
            traffic_class: vars
                .number("SIDELANE_VERBS_TRAFFIC_CLASS", 0..=255, "0 to 255")?
                .unwrap_or(usual.traffic_class),
            timeout: vars.number("SIDELANE_VERBS_TIMEOUT", 0..=31, "0 to 31")?.unwrap_or(usual.timeout),
            retries: vars.number("SIDELANE_VERBS_RETRIES", 0..=7, "0 to 7")?.unwrap_or(usual.retries),
            grace: vars
                .number("SIDELANE_VERBS_GRACE_MS", 0..=3_600_000, "milliseconds, up to an hour")?
                .map(Duration::from_millis),
            rnr_retries: vars
                .number("SIDELANE_VERBS_RNR_RETRIES", 0..=7, "0 to 7")?
                .unwrap_or(usual.rnr_retries),
            mtu: vars.mtu()?,
            chunk,
            in_flight: in_flight.unwrap_or(usual.in_flight.max(chunk)),
            staging: staging.unwrap_or(usual.staging.max(slots)),
            queue_pairs: vars
                .number("SIDELANE_VERBS_QUEUE_PAIRS", QUEUE_PAIRS, "1 to 8")?
                .unwrap_or(usual.queue_pairs),
            signal: vars.signal()?,
            relaxed: vars.number("SIDELANE_VERBS_RELAXED_ORDERING", 0..=1, "0 or 1")?.map(|n: u8| n == 1),
        })
    }

    /// How long a port may be down. The rank whose port it is must name itself before the retries
    /// of its peers end: they could only name a connection. So it waits for two thirds of that time
    /// at most.
    pub fn grace(&self) -> Duration {
        let longest = match self.timeout {
            // Packets are sent again for ever.
            0 => FLAP,
            timeout => Duration::from_nanos(4096 << timeout) * (u32::from(self.retries) + 1) * 2 / 3,
        };
        self.grace.unwrap_or(longest.min(FLAP))
    }

    /// From this process's environment.
    ///
    /// # Errors
    /// As [`Settings::from_vars`].
    pub fn from_env() -> Result<Self, BootstrapError> {
        Self::from_vars(&|name| std::env::var(name).ok())
    }
}

struct Vars<'a>(&'a dyn Fn(&str) -> Option<String>);

impl Vars<'_> {
    fn text(&self, name: &str) -> Option<String> {
        (self.0)(name).map(|value| value.trim().to_owned()).filter(|value| !value.is_empty())
    }

    fn read<T>(
        &self,
        name: &'static str,
        expected: &'static str,
        parse: impl Fn(&str) -> Option<T>,
    ) -> Result<Option<T>, BootstrapError> {
        let Some(value) = self.text(name) else { return Ok(None) };
        match parse(&value) {
            Some(parsed) => Ok(Some(parsed)),
            None => Err(BootstrapError::BadVariable { name, value, expected }),
        }
    }

    fn number<N: FromStr + PartialOrd>(
        &self,
        name: &'static str,
        range: RangeInclusive<N>,
        expected: &'static str,
    ) -> Result<Option<N>, BootstrapError> {
        self.read(name, expected, |value| value.parse().ok().filter(|n| range.contains(n)))
    }

    fn bytes(
        &self,
        name: &'static str,
        range: RangeInclusive<u64>,
        expected: &'static str,
    ) -> Result<Option<u64>, BootstrapError> {
        self.read(name, expected, |value| parse_bytes(value).filter(|n| range.contains(n)))
    }

    fn nics(&self) -> Result<Vec<String>, BootstrapError> {
        let list = |value: &str| {
            let nics: Vec<String> = value.split(',').map(|nic| nic.trim().to_owned()).collect();
            let twice = |at: usize| nics[..at].contains(&nics[at]);
            let bad = (0..nics.len()).any(|at| nics[at].is_empty() || twice(at));
            (!bad).then_some(nics)
        };
        let expected = "names of NICs with commas between, each once";
        Ok(self.read("SIDELANE_VERBS_NICS", expected, list)?.unwrap_or_default())
    }

    fn subnets(&self) -> Result<Vec<Subnet>, BootstrapError> {
        let list = |value: &str| value.split(',').map(|subnet| subnet.parse().ok()).collect();
        let expected = "subnets with commas between, such as 10.1.0.0/16";
        Ok(self.read("SIDELANE_VERBS_SUBNETS", expected, list)?.unwrap_or_default())
    }

    fn mtu(&self) -> Result<Option<Mtu>, BootstrapError> {
        let expected = "256, 512, 1024, 2048 or 4096";
        self.read("SIDELANE_VERBS_MTU", expected, |value| {
            let bytes: u32 = value.parse().ok()?;
            Mtu::ALL.into_iter().find(|mtu| mtu.bytes() == bytes)
        })
    }

    fn signal(&self) -> Result<Option<SignalMode>, BootstrapError> {
        let mode = |value: &str| match value {
            AUTO => Some(None),
            _ => SignalMode::ALL.into_iter().find(|mode| mode.name() == value).map(Some),
        };
        let read = self.read("SIDELANE_VERBS_SIGNAL", "auto, write, fetch-add or immediate", mode);
        Ok(read?.flatten())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(vars: &[(&str, &str)]) -> Result<Settings, BootstrapError> {
        Settings::from_vars(&|name| {
            vars.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn every_variable_is_in_the_documentation() {
        let (code, docs) = (include_str!("settings.rs"), include_str!("../../../../docs/verbs.md"));
        let quoted = code.split('"').filter(|text| {
            text.starts_with("SIDELANE_") && text.bytes().all(|b| b == b'_' || b.is_ascii_uppercase())
        });
        let mut names: Vec<&str> = quoted.collect();
        names.sort_unstable();
        names.dedup();
        assert!(names.len() > 10, "{names:?}");
        for name in names.into_iter().filter(|name| *name != "SIDELANE_") {
            assert!(docs.contains(&format!("| `{name}` |")), "{name}");
        }
    }

    #[test]
    fn every_variable_is_read() {
        let settings = read(&[
            ("SIDELANE_IBVERBS_LIBRARY", "/opt/libibverbs.so"),
            ("SIDELANE_VERBS_NICS", "mlx5_1, mlx5_0"),
            ("CUDA_VISIBLE_DEVICES", "1,0"),
            ("SIDELANE_VERBS_PORT", "2"),
            ("SIDELANE_VERBS_GID_INDEX", "3"),
            ("SIDELANE_VERBS_SUBNETS", "10.1.0.0/16, fd00::/8"),
            ("SIDELANE_VERBS_PKEY_INDEX", "300"),
            ("SIDELANE_VERBS_SERVICE_LEVEL", "5"),
            ("SIDELANE_VERBS_TRAFFIC_CLASS", "106"),
            ("SIDELANE_VERBS_TIMEOUT", "17"),
            ("SIDELANE_VERBS_RETRIES", "5"),
            ("SIDELANE_VERBS_GRACE_MS", "1500"),
            ("SIDELANE_VERBS_RNR_RETRIES", "1"),
            ("SIDELANE_VERBS_MTU", "1024"),
            ("SIDELANE_VERBS_CHUNK", "64K"),
            ("SIDELANE_VERBS_IN_FLIGHT", "1M"),
            ("SIDELANE_VERBS_STAGING", "2M"),
            ("SIDELANE_VERBS_QUEUE_PAIRS", "4"),
            ("SIDELANE_VERBS_SIGNAL", "immediate"),
            ("SIDELANE_VERBS_RELAXED_ORDERING", "0"),
        ]);
        let expected = Settings {
            library: Some("/opt/libibverbs.so".into()),
            nics: vec!["mlx5_1".into(), "mlx5_0".into()],
            visible_gpus: Some("1,0".into()),
            port: Some(2),
            gid_index: Some(3),
            subnets: vec!["10.1.0.0/16".parse().unwrap(), "fd00::/8".parse().unwrap()],
            pkey_index: Some(300),
            service_level: 5,
            traffic_class: 106,
            timeout: 17,
            retries: 5,
            grace: Some(Duration::from_millis(1500)),
            rnr_retries: 1,
            mtu: Some(Mtu::B1024),
            chunk: 64 << 10,
            in_flight: 1 << 20,
            staging: 2 << 20,
            queue_pairs: 4,
            signal: Some(SignalMode::Immediate),
            relaxed: Some(false),
        };
        assert_eq!(settings, Ok(expected));
        assert_eq!(read(&[("SIDELANE_VERBS_NICS", " ")]), Ok(Settings::default()));
        assert_eq!(read(&[("SIDELANE_VERBS_SIGNAL", "auto")]), Ok(Settings::default()));
    }

    #[test]
    fn a_bad_value_is_an_error_that_names_its_variable() {
        for (name, value) in [
            ("SIDELANE_VERBS_NICS", "mlx5_0,,mlx5_1"),
            ("SIDELANE_VERBS_NICS", "mlx5_0,mlx5_0"),
            ("SIDELANE_VERBS_PORT", "0"),
            ("SIDELANE_VERBS_GID_INDEX", "256"),
            ("SIDELANE_VERBS_SUBNETS", "10.1.0.0"),
            ("SIDELANE_VERBS_SUBNETS", "10.1.0.0/33"),
            ("SIDELANE_VERBS_PKEY_INDEX", "-1"),
            ("SIDELANE_VERBS_SERVICE_LEVEL", "16"),
            ("SIDELANE_VERBS_TRAFFIC_CLASS", "0x6a"),
            ("SIDELANE_VERBS_TIMEOUT", "32"),
            ("SIDELANE_VERBS_RETRIES", "8"),
            ("SIDELANE_VERBS_GRACE_MS", "5s"),
            ("SIDELANE_VERBS_RNR_RETRIES", "8"),
            ("SIDELANE_VERBS_MTU", "1500"),
            ("SIDELANE_VERBS_CHUNK", "1K"),
            ("SIDELANE_VERBS_CHUNK", "2G"),
            ("SIDELANE_VERBS_IN_FLIGHT", "64K"),
            ("SIDELANE_VERBS_STAGING", "1023K"),
            ("SIDELANE_VERBS_QUEUE_PAIRS", "0"),
            ("SIDELANE_VERBS_QUEUE_PAIRS", "9"),
            ("SIDELANE_VERBS_SIGNAL", "flag"),
            ("SIDELANE_VERBS_RELAXED_ORDERING", "2"),
        ] {
            let seen = read(&[(name, value)]);
            let right = matches!(&seen, Err(BootstrapError::BadVariable { name: n, value: v, .. }) if *n == name && v == value);
            assert!(right, "{name}={value}: {seen:?}");
        }
    }

    #[test]
    fn port_grace_is_5_seconds_or_less_if_retries_end_sooner() {
        let grace = |vars: &[(&str, &str)]| read(vars).unwrap().grace();
        let retries = |timeout: u32, retries: u32| Duration::from_nanos(4096 << timeout) * (retries + 1);
        assert_eq!(grace(&[]), Duration::from_secs(5));
        assert!(retries(18, 6) > Duration::from_secs(5));
        for (timeout, times) in [("14", "6"), ("18", "2"), ("1", "0")] {
            let vars = [("SIDELANE_VERBS_TIMEOUT", timeout), ("SIDELANE_VERBS_RETRIES", times)];
            let until = retries(timeout.parse().unwrap(), times.parse().unwrap());
            assert_eq!(grace(&vars), until * 2 / 3, "{timeout}, {times}");
            let asked = [&vars[..], &[("SIDELANE_VERBS_GRACE_MS", "7000")]].concat();
            assert_eq!(grace(&asked), Duration::from_secs(7), "a setting is followed");
        }
        for timeout in ["0", "31"] {
            assert_eq!(grace(&[("SIDELANE_VERBS_TIMEOUT", timeout)]), Duration::from_secs(5), "{timeout}");
        }
    }

    #[test]
    fn a_large_chunk_raises_what_may_be_under_way() {
        let settings = read(&[("SIDELANE_VERBS_CHUNK", "16M")]).unwrap();
        assert_eq!((settings.chunk, settings.in_flight), (16 << 20, 16 << 20));
    }
}
