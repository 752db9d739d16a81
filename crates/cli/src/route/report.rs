//! What `route` has seen: as people read it, and its JSON, whose keys are described in `docs/route-json.md`.

use std::fmt::Write;

use serde::Serialize;

use super::bars;
use super::drops::Dropped;
use super::loads::{Load, Loads, Spread};
use super::task::Task;
use crate::error::CliError;
use crate::launch::shape_words;
use crate::routing::Source;
use crate::{command, table};

/// What was looked at.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Conditions {
    pub routing: Source,
    pub experts: u32,
    pub top_k: u32,
    pub ranks_per_node: Vec<u32>,
    /// Of each rank.
    pub tokens: u32,
    pub seed: u64,
}

/// Everything that is known.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    pub config: Conditions,
    pub load: Loads,
    pub capacity: Vec<Dropped>,
}

impl Report {
    /// Counts.
    pub fn new(task: &Task) -> Result<Self, CliError> {
        Ok(Report {
            config: task.conditions.clone(),
            load: Loads::new(&task.map, &task.nodes, &task.routings),
            capacity: task.table()?,
        })
    }

    fn loads(&self) -> String {
        let mut table = table::figures(["load of", "number", "max / mean", "min / mean", "evenness"]);
        let Loads { experts, ranks, nodes, .. } = &self.load;
        for (name, load) in [("experts", experts), ("ranks", ranks), ("nodes", nodes)] {
            let Load { choices, max_over_mean, min_over_mean, evenness } = load;
            let figures = [max_over_mean, min_over_mean].map(|figure| format!("{figure:.2}"));
            let [max, min] = figures;
            table.add_row([name.to_owned(), choices.len().to_string(), max, min, format!("{evenness:.4}")]);
        }
        table.trim_fmt()
    }

    fn spreads(&self) -> String {
        let Loads { ranks_per_token, nodes_per_token, .. } = &self.load;
        let most = ranks_per_token.tokens.len();
        let numbers = (0..most).map(|places| places.to_string());
        let header = ["a token reaches".to_owned(), "mean".to_owned()].into_iter().chain(numbers);
        let mut table = table::figures(header.collect::<Vec<_>>());
        for (name, spread) in [("ranks", ranks_per_token), ("nodes", nodes_per_token)] {
            let Spread { mean, tokens } = spread;
            let all = tokens.iter().sum::<u64>().max(1) as f64;
            let shares = tokens.iter().map(|&tokens| percent(tokens as f64 / all));
            table.add_row([name.to_owned(), format!("{mean:.2}")].into_iter().chain(shares));
        }
        table.trim_fmt()
    }

    fn drops(&self) -> String {
        let ways = self.capacity.first().into_iter().flat_map(|dropped| &dropped.lost);
        let names = ways.map(|lost| lost.keep.replace('_', " "));
        let names =
            names.enumerate().map(|(n, name)| if n == 0 { format!("weight by {name}") } else { name });
        let header = ["capacity factor", "rows", "choices dropped"].map(str::to_owned).into_iter();
        let mut table =
            table::figures(header.chain(names).chain(["tokens emptied".to_owned()]).collect::<Vec<_>>());
        for dropped in &self.capacity {
            let cells = [dropped.factor.to_string(), dropped.rows.to_string(), percent(dropped.choices)];
            let weights = dropped.lost.iter().map(|lost| percent(lost.weight));
            let emptied = dropped.lost.iter().map(|lost| lost.tokens);
            let (least, most) =
                emptied.fold((1.0, 0.0), |(low, high), x| (f64::min(low, x), f64::max(high, x)));
            let emptied = if least == most {
                percent(least)
            } else {
                format!("{} to {}", percent(least), percent(most))
            };
            table.add_row(cells.into_iter().chain(weights).chain([emptied]));
        }
        table.trim_fmt()
    }
}

impl Conditions {
    /// Where decisions come from, and who has them.
    pub fn words(&self) -> [String; 2] {
        let Conditions { routing, experts, top_k, seed, tokens, .. } = self;
        [
            format!("{routing}, {experts} experts, top-{top_k}, seed {seed}"),
            format!("{}, {tokens} tokens each, experts in equal blocks", shape_words(&self.ranks_per_node)),
        ]
    }
}

/// Two digits; none where there is nothing.
fn percent(share: f64) -> String {
    if share == 0.0 { "-".into() } else { format!("{:.2}%", share * 100.0) }
}

impl command::Report for Report {
    /// Conditions, bars, and two tables.
    fn text(&self) -> String {
        let [routing, ranks] = self.config.words();
        let mut text =
            format!("routing   {routing}\nranks     {ranks}\n\nchoices per expert, by their mean\n\n");
        text += &bars::draw(&self.load.experts.choices);
        let _ = write!(text, "\n{}\n\n{}\n\n{}\n", self.loads(), self.spreads(), self.drops());
        text.trim_end().to_owned()
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::command::tests::{assert_page, parsed};

    const DOCUMENT: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/route-json.md"));

    pub fn resolve(words: &str) -> Result<Task, CliError> {
        Task::resolve(&parsed(words).unwrap())
    }

    #[test]
    fn the_document_names_exactly_the_keys_of_the_json() {
        let report = Report::new(&resolve("").unwrap()).unwrap();
        assert_page(DOCUMENT, &[report], |key| Some(key.to_owned()));
    }

    #[test]
    fn what_cannot_be_shown_is_an_error_that_says_why() {
        for (words, said) in [
            ("--tokens 0", "--tokens must be at least 1"),
            ("--experts 4 --top-k 5", "top_k = 5"),
            ("--factors 0", "capacity factor = 0"),
            ("--factors=-1", "capacity factor = -1"),
            ("/nowhere.jsonl", "/nowhere.jsonl"),
            ("--nodes 3 --ranks-per-node 3,5", "--ranks-per-node lists 2 nodes"),
        ] {
            let error = resolve(words).and_then(|task| Report::new(&task)).unwrap_err();
            assert!(error.to_string().contains(said), "{words}: {error}");
        }
    }

    #[test]
    fn a_load_that_is_even_drops_nothing_from_factor_one_on() {
        let task = resolve("uniform --experts 4 --top-k 4 --factors 0.5,1,2").unwrap();
        let report = Report::new(&task).unwrap();
        let dropped: Vec<_> = report.capacity.iter().map(|dropped| (dropped.rows, dropped.choices)).collect();
        assert_eq!(dropped, [(256, 0.5), (512, 0.0), (1024, 0.0)]);
        assert!(report.capacity[1].lost.iter().all(|lost| (lost.weight, lost.tokens) == (0.0, 0.0)));
        let [score, position, ..] = &report.capacity[0].lost[..] else { panic!("several ways") };
        assert!(score.weight < position.weight, "{score:?} {position:?}");
        assert_eq!((score.keep.as_str(), position.tokens), ("score", 0.5));
    }
}
