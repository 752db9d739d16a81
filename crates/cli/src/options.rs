//! Options that several commands have, each in one place: placement of ranks, decisions of a
//! router, rows, and values of options. Defaults that differ are parameters, stated at the use.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};
use sidelane::dtype::{Dtype, Fp8RowShape};
use sidelane_model::time::Hardware;

use crate::commands::doctor::{Root, available_memory};
use crate::commands::launch::node_sizes;
use crate::error::{CliError, usage};
use crate::routing_source::{Decided, EXPERTS, Routed, Share, Source, TOP_K};
use crate::table::bytes;

/// Ranks by node; `NODES` of `RANKS` where nothing is said.
#[derive(Args, Clone, Debug, Default)]
pub struct NodeArgs<const NODES: u32, const RANKS: u32> {
    #[arg(long, value_name = "N",
          help = format!("Number of nodes [default: {NODES}; with --ranks-per-node as many as it lists, so one number is one node]"))]
    pub nodes: Option<u32>,

    #[arg(long, value_name = "M[,M..]", value_delimiter = ',',
          help = format!("Ranks of each node; a list gives nodes of different size [default: {RANKS}]"))]
    pub ranks_per_node: Vec<u32>,
}

impl<const NODES: u32, const RANKS: u32> NodeArgs<NODES, RANKS> {
    pub fn sizes(&self) -> Result<Vec<u32>, CliError> {
        match &self.ranks_per_node[..] {
            [] => node_sizes(self.nodes.or(Some(NODES)), &[RANKS]),
            sizes => node_sizes(self.nodes, sizes),
        }
    }
}

/// Decisions of a router; with `TOKENS` tokens by default, and with experts of a model or of the
/// recording.
#[derive(Args, Clone, Debug)]
pub struct RouterArgs<const TOKENS: u32, const MODEL: bool = false> {
    #[arg(long, value_name = "E",
          help = format!("Number of experts [default: {}, or num_experts of the routing file]", own(MODEL, EXPERTS)))]
    pub experts: Option<u32>,

    #[arg(long, value_name = "K",
          help = format!("Experts that each token chooses [default: {}, or as in the routing file]", own(MODEL, TOP_K)))]
    pub top_k: Option<u32>,

    #[arg(long, value_name = "T", help = format!("Tokens of each rank [default: {TOKENS}]"))]
    pub tokens: Option<u32>,

    /// Draws synthetic routing, logits and rows [default: 0]
    #[arg(long)]
    pub seed: Option<u64>,
}

impl<const TOKENS: u32, const MODEL: bool> RouterArgs<TOKENS, MODEL> {
    pub fn tokens(&self) -> u32 {
        self.tokens.unwrap_or(TOKENS)
    }

    pub fn seed(&self) -> u64 {
        self.seed.unwrap_or(0)
    }

    /// The requested routing, completed from the recording or the routing file. Prints a note when
    /// it draws a pattern because no routing was requested and the recording does not fit.
    pub fn resolve(&self, asked: &Option<Source>) -> Result<(Routed, Share), CliError> {
        let routed = Routed::resolve(asked.clone(), self.experts, self.top_k)?;
        let Routed { experts, top_k, .. } = routed;
        let share = Share { experts, top_k, tokens: self.tokens(), seed: self.seed() };
        at_least_one(&[("--tokens", share.tokens), ("--experts", experts), ("--top-k", top_k)])?;
        if asked.is_none() && routed.source != Source::Recorded {
            let source = &routed.source;
            eprintln!("sidelane: routing is {source}: the recorded one has {EXPERTS} experts, top-{TOP_K}");
        }
        Ok((routed, share))
    }
}

/// Decisions of a router for ranks on nodes.
#[derive(Args, Clone, Debug)]
pub struct RoutedArgs<const NODES: u32, const RANKS: u32, const TOKENS: u32> {
    /// recorded (a trained router's decisions, 64 experts, top-8), uniform, zipf:S, incast (all
    /// tokens choose among the first eighth of the experts), or a file with a line for each token,
    /// {"topk_ids": [3, 9], "topk_weights": [0.6, 0.4]}, and a first line
    /// {"type": "meta", "num_experts": 64} for their number [default: recorded; zipf:1.0 if
    /// --experts or --top-k differ from it]
    #[arg(value_name = "recorded|PATTERN|FILE")]
    pub routing: Option<Source>,

    #[command(flatten)]
    pub nodes: NodeArgs<NODES, RANKS>,

    #[command(flatten)]
    pub router: RouterArgs<TOKENS>,
}

impl<const NODES: u32, const RANKS: u32, const TOKENS: u32> RoutedArgs<NODES, RANKS, TOKENS> {
    /// The decisions of all ranks, by this source unless one is given, for a command that takes so
    /// many bytes for each choice.
    pub fn decide(&self, unless_given: Option<Source>, choice_bytes: u64) -> Result<Decided, CliError> {
        let asked = self.routing.clone().or(unless_given);
        let (routed, share) = self.router.resolve(&asked)?;
        Decided::new(self.nodes.sizes()?, routed, share, choice_bytes)
    }
}

/// A row: so many elements by default, or those of the model, for which 0 stands.
#[derive(Args, Clone, Debug)]
pub struct RowArgs<const HIDDEN: u32> {
    #[arg(long, value_name = "H",
          help = format!("Elements of a row [default: {}]", own(HIDDEN == 0, HIDDEN)))]
    pub hidden: Option<u32>,

    /// Type of an element; fp8 is sent as records with scales, and bf16 returns
    #[arg(long, value_enum, default_value_t = RowType::Bf16)]
    pub dtype: RowType,
}

impl<const HIDDEN: u32> RowArgs<HIDDEN> {
    pub fn hidden(&self) -> u32 {
        self.hidden.unwrap_or(HIDDEN)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RowType {
    Bf16,
    F16,
    F32,
    /// Dispatched as records of e4m3 values and their scales; what comes back is bf16
    Fp8,
}

impl RowType {
    pub fn element(self) -> Dtype {
        match self {
            RowType::Bf16 | RowType::Fp8 => Dtype::Bf16,
            RowType::F16 => Dtype::F16,
            RowType::F32 => Dtype::F32,
        }
    }

    /// Bytes of a row of `hidden` elements that is dispatched, and of one that comes back.
    pub fn bytes(self, hidden: u32) -> (u64, u64) {
        let returned = u64::from(hidden) * self.element().size() as u64;
        let sent = if self == RowType::Fp8 { Fp8RowShape::new(hidden).bytes() as u64 } else { returned };
        (sent, returned)
    }

    pub fn name(self) -> String {
        word(&self)
    }
}

/// A default in words: this figure, unless a model has one of its own.
fn own(of_model: bool, figure: u32) -> String {
    if of_model { "the model's".to_owned() } else { figure.to_string() }
}

/// Where a report goes as JSON, by this process or by ranks.
#[derive(Args, Clone, Debug, Default)]
pub struct JsonFile<const RANKS: bool = false> {
    #[arg(long, value_name = "FILE", help = match RANKS {
        true => "Write the report as JSON, on the machine of rank 0; - is its standard output",
        false => "Write the report as JSON; - is standard output",
    })]
    pub json: Option<PathBuf>,
}

pub fn at_least_one(options: &[(&str, u32)]) -> Result<(), CliError> {
    let zero = options.iter().find(|(_, value)| *value == 0);
    zero.map_or(Ok(()), |(option, _)| Err(usage!("{option} must be at least 1")))
}

/// Refuses an option, or a product of some, that is zero or more than so many.
pub fn at_most<T: Into<u64> + Copy>(options: &[(&str, T, u32)]) -> Result<(), CliError> {
    let beyond = options.iter().find(|(_, value, most)| !(1..=u64::from(*most)).contains(&(*value).into()));
    beyond.map_or(Ok(()), |(option, _, most)| Err(usage!("{option} must be between 1 and {most}")))
}

/// Refuses to take more bytes than this machine has left: the kernel would kill the process without
/// a message. `lower` names what lowers the need.
pub fn fits_in_memory(what: &str, needed: u64, lower: &str) -> Result<(), CliError> {
    fits(what, needed, available_memory(&Root::new("/")), lower)
}

/// The same, of so many bytes that are left; `None` where the system does not say.
fn fits(what: &str, needed: u64, available: Option<u64>, lower: &str) -> Result<(), CliError> {
    let Some(available) = available.filter(|&available| needed > available) else { return Ok(()) };
    let (needed, available) = (bytes(needed), bytes(available));
    Err(usage!("{what} need {needed} of memory, and {available} are available: lower {lower}"))
}

/// A machine that is known, or a file that describes one.
pub fn hardware(name: &str) -> Result<Hardware, CliError> {
    hardware_or(name, &[])
}

/// The same, for a command that knows others by name alone.
pub fn hardware_or(name: &str, others: &[&str]) -> Result<Hardware, CliError> {
    let known = [&Hardware::NAMES[..], others].concat();
    known_or_file(("--hardware", "machine"), name, &known, |text| serde_json::from_str(text))
}

/// The value of an option that is one of these by name, or that a file describes.
pub fn known_or_file<T: FromStr, E: fmt::Display>(
    (option, what): (&str, &str),
    name: &str,
    known: &[&str],
    read: impl FnOnce(&str) -> Result<T, E>,
) -> Result<T, CliError> {
    if let Ok(known) = name.parse() {
        return Ok(known);
    }
    let text = std::fs::read_to_string(name).map_err(|source| {
        let known = known.join(", ");
        usage!(
            "{option} {name} is neither a {what} known here ({known}) nor a file that can be read: {source}"
        )
    })?;
    read(&text).map_err(|source| usage!("{name:?} describes no {what}: {source}"))
}

/// A number as it is written and shown: `8`, `4K`, `1M`, `1000`. Suffixes are powers of 1024.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scaled(pub u64);

const UNITS: [(u32, &str); 3] = [(30, "G"), (20, "M"), (10, "K")];

impl FromStr for Scaled {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let none = || format!("{text:?} is no number, alone or with K, M or G");
        let upper = text.trim().to_ascii_uppercase();
        let unit = UNITS.into_iter().find_map(|(shift, unit)| Some((shift, upper.strip_suffix(unit)?)));
        let (shift, digits) = unit.unwrap_or((0, &upper));
        let number = digits.parse::<u64>().ok().and_then(|number| number.checked_mul(1 << shift));
        number.map(Scaled).ok_or_else(none)
    }
}

impl fmt::Display for Scaled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match UNITS.into_iter().find(|(shift, _)| self.0 > 0 && self.0.trailing_zeros() >= *shift) {
            Some((shift, unit)) => write!(f, "{}{unit}", self.0 >> shift),
            None => self.0.fmt(f),
        }
    }
}

/// A number above 0 and up to this one.
pub fn up_to(most: f64) -> impl Fn(&str) -> Result<f64, String> + Clone {
    move |text| {
        let number: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
        let is_within = number > 0.0 && number <= most;
        if is_within { Ok(number) } else { Err(format!("not above 0 and up to {most}")) }
    }
}

/// The word of the command line for a value.
pub fn word(value: &impl ValueEnum) -> String {
    value.to_possible_value().map_or(String::new(), |value| value.get_name().to_owned())
}

/// One of the library's own words for it.
pub fn one_of<T, const N: usize>(all: [T; N], name: fn(T) -> &'static str) -> impl TypedValueParser<Value = T>
where
    T: Copy + Send + Sync + 'static,
{
    PossibleValuesParser::new(all.map(name))
        .map(move |seen| all.into_iter().find(|&one| name(one) == seen).expect("one of the names above"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_shown_as_they_are_written() {
        for (number, text) in
            [(8, "8"), (4096, "4K"), (3 << 20, "3M"), (1000, "1000"), (1 << 30, "1G"), (0, "0")]
        {
            assert_eq!((Scaled(number).to_string(), text.parse()), (text.to_owned(), Ok(Scaled(number))));
        }
        assert_eq!("4k".parse(), Ok(Scaled(4096)));
        assert!("99999999999G".parse::<Scaled>().is_err());
    }

    #[test]
    fn excess_memory_need_names_need_available_and_option_to_lower() {
        let seen = |needed, available| {
            fits("the choices of 8 ranks", needed, available, "--tokens").map_err(|error| error.to_string())
        };
        let refused = "the choices of 8 ranks need 3 GiB of memory, and 2 GiB are available: lower --tokens";
        assert_eq!(seen(3 << 30, Some(2 << 30)), Err(refused.to_owned()));
        assert_eq!(seen(2 << 30, Some(2 << 30)), Ok(()));
        assert_eq!(seen(u64::MAX, None), Ok(()), "the system does not say how much there is");
    }
}
