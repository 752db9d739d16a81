//! What peers took, beside ours. Keys are described in `docs/bench-json.md`.

use serde::{Deserialize, Serialize};

use super::contender::Contender;
use crate::peers::Unavailable;
use crate::stats::{ratio_of_medians, summary};
use crate::table::{self, time};

/// Those that ran and those that could not.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Peers {
    pub ran: Vec<PeerReport>,
    pub absent: Vec<Unavailable>,
}

/// One that ran.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PeerReport {
    pub name: String,
    /// What it says that it is.
    pub version: String,
    /// Whether its rows and sums are ours, bit by bit.
    pub same: bool,
    pub dispatch: PeerPass,
    pub combine: PeerPass,
}

/// One kind of call.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct PeerPass {
    pub p50_us: f64,
    pub max_us: f64,
    /// By what factor ours is faster: median by median.
    pub times: f64,
    pub times_low: f64,
    pub times_high: f64,
}

impl PeerReport {
    /// Beside our rounds of dispatch and of combine.
    pub fn new(contender: &Contender, same: bool, real_us: [&[f64]; 2]) -> Self {
        let pass = |nth: usize| PeerPass::new(&contender.rounds_us[nth], real_us[nth]);
        PeerReport {
            name: contender.way.name().into(),
            version: contender.version.clone(),
            same,
            dispatch: pass(0),
            combine: pass(1),
        }
    }
}

impl PeerPass {
    /// Of the same rounds.
    pub fn new(theirs_us: &[f64], ours_us: &[f64]) -> Self {
        let (seen, times) = (summary(theirs_us), ratio_of_medians(theirs_us, ours_us));
        PeerPass {
            p50_us: seen.p50,
            max_us: seen.max,
            times: times.value,
            times_low: times.low,
            times_high: times.high,
        }
    }
}

impl Peers {
    /// Whether all that ran have computed what we have.
    pub fn all_same(&self) -> bool {
        self.ran.iter().all(|peer| peer.same)
    }

    /// As people read it.
    pub fn text(&self) -> String {
        let mut text = String::new();
        if !self.ran.is_empty() {
            let header =
                ["peer", "dispatch", "max", "x ours (95%)", "combine", "max", "x ours (95%)", "result"];
            let mut table = table::figures(header);
            for peer in &self.ran {
                let pass = |pass: PeerPass| {
                    let PeerPass { p50_us, max_us, times, times_low, times_high } = pass;
                    [time(p50_us), time(max_us), format!("{times:.1} ({times_low:.1}-{times_high:.1})")]
                };
                let result = if peer.same { "same bits" } else { "NOT THE SAME" };
                let row =
                    [peer.version.clone()].into_iter().chain(pass(peer.dispatch)).chain(pass(peer.combine));
                table.add_row(row.chain([result.into()]).collect::<Vec<_>>());
            }
            text = table.trim_fmt() + "\n";
        }
        self.absent.iter().fold(text, |text, peer| text + &peer.text() + "\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::failed;

    #[test]
    fn ratios_are_theirs_by_ours_of_the_same_rounds() {
        let pass = PeerPass::new(&[30.0, 10.0, 20.0], &[6.0, 2.0, 4.0]);
        assert_eq!((pass.p50_us, pass.max_us), (20.0, 30.0));
        assert_eq!((pass.times_low, pass.times, pass.times_high), (5.0, 5.0, 5.0));
    }

    #[test]
    fn the_text_says_who_ran_who_did_not_and_who_computed_something_else() {
        let pass = PeerPass::new(&[34_000.0; 3], &[4000.0; 3]);
        let ran = |same| PeerReport {
            name: "mpi".into(),
            version: "Open MPI v4".into(),
            same,
            dispatch: pass,
            combine: pass,
        };
        let absent = Unavailable::new("gloo", &failed!("there is no python3"), "pip install torch");
        let peers = Peers { ran: vec![ran(true)], absent: vec![absent] };
        let text = peers.text();
        for words in
            ["Open MPI v4", "34.0 ms", "8.5 (8.5-8.5)", "same bits", "there is no python3", "pip install"]
        {
            assert!(text.contains(words), "{words:?} in\n{text}");
        }
        let wrong = Peers { ran: vec![ran(true), ran(false)], absent: Vec::new() };
        assert!(peers.all_same() && !wrong.all_same() && wrong.text().contains("NOT THE SAME"));
    }
}
