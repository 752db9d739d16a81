//! A host as a machine, from what was measured on it.

use super::{Compute, CopyCost, Engines, Executor, Hardware, Host, Link, NicModel, Source};

/// Seconds that bare loops of all cores took, in the best of many rounds: one rank's bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Loops {
    /// Bytes of a row.
    pub row_bytes: f64,
    /// Of a dispatch.
    pub copy: f64,
    /// Of a combine.
    pub sum: f64,
    /// Rows that a rank copied.
    pub rows: f64,
    /// Rows that it wrote: a sum for each token.
    pub sums: f64,
}

/// Figures measured on a host. Times are in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HostFigures {
    /// Its cores.
    pub cores: u32,
    /// Ranks of the loops, which take turns if there are more of them than cores.
    pub ranks: u32,
    /// Loops of short rows and of long ones.
    pub loops: [Loops; 2],
    /// Of a word raised, and from one rank's to another's seeing it.
    pub words: [f64; 2],
    /// Of a choice sorted, a choice placed, a bin.
    pub planning: [f64; 3],
}

impl HostFigures {
    /// The machine; none where long rows took no longer than short ones: then no rate follows.
    pub fn hardware(&self) -> Option<Hardware> {
        let HostFigures { cores, ranks, loops: [small, large], .. } = *self;
        // Two equations, time = rows * price + bytes / rate, where cores take turns if there are
        // more ranks than these.
        let turns = f64::from(ranks) / f64::from(cores);
        let per_row = |loops: &Loops| loops.copy / turns / loops.rows;
        let per_byte = (per_row(&large) - per_row(&small)) / (large.row_bytes - small.row_bytes);
        if per_byte <= 0.0 {
            return None;
        }
        let price = (per_row(&small) - per_byte * small.row_bytes).max(0.0);
        let rate = mb_s(1.0 / per_byte);
        // A sum reads as many rows as were copied here, and writes a row for each token.
        let sum_rate = mb_s((large.rows + large.sums) * large.row_bytes / (large.sum / turns));
        let ([signal, one_way], [sort, place, per_bin]) = (self.words, self.planning);
        let cost = CopyCost { from_bytes: 0, per_copy: ns(price), rate };
        Some(Hardware {
            name: "this machine".to_owned(),
            executor: Executor::Host,
            // Cores copy: there is nothing to enqueue.
            engines: Engines {
                peer: vec![cost],
                own: vec![cost],
                host: vec![cost],
                per_batch: 0,
                per_word: 0,
                per_list: 0,
                per_call: 0,
                enqueue_copy: 0,
                enqueue_word: 0,
                switched: true,
            },
            link: Link { rate, load_rate: sum_rate, latency: 0 },
            nic: NicModel {
                per_node: 0,
                rate,
                per_message: ns(price),
                message_bytes: 65_536,
                latency: ns(one_way),
            },
            compute: Compute { rate: sum_rate, launch: 0, sort: 0 },
            host: Host {
                cores,
                signal: ns(signal),
                latency: ns((one_way - 2.0 * signal).max(0.0)),
                sort: ps(sort),
                place: ps(place),
                per_bin: ps(per_bin),
            },
            peaks: None,
            sources: sources(),
        })
    }
}

/// All is measured here, apart from what a host has not.
fn sources() -> Vec<Source> {
    let source = |figures: &[&str], source: &str| Source {
        figures: figures.iter().map(|&name| name.to_owned()).collect(),
        source: source.to_owned(),
    };
    let parts = ["engines", "link", "nic", "compute", "host"];
    vec![
        source(
            &["link.latency", "compute.launch", "compute.sort"],
            "assumed: 0, a host launches nothing, and words have their own latency",
        ),
        source(
            &["nic.per_message", "nic.message_bytes"],
            "assumed: a ring costs a copy, and takes 64 KiB at once",
        ),
        source(&parts, "measured: simulate --calibrate"),
    ]
}

fn mb_s(bytes_per_second: f64) -> u64 {
    (bytes_per_second / 1e6).round().max(1.0) as u64
}

fn ns(seconds: f64) -> u64 {
    (seconds * 1e9).round() as u64
}

fn ps(seconds: f64) -> u64 {
    (seconds * 1e12).round() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows that cost a microsecond each and a nanosecond a byte, on half as many cores as ranks.
    fn figures() -> HostFigures {
        let loops = |row_bytes: f64| {
            let (rows, sums) = (100.0, 50.0);
            let copy = 2.0 * rows * (1e-6 + row_bytes * 1e-9);
            Loops { row_bytes, copy, sum: 2.0 * (rows + sums) * row_bytes * 1e-9, rows, sums }
        };
        HostFigures {
            cores: 2,
            ranks: 4,
            loops: [loops(64.0), loops(16_384.0)],
            words: [1e-7, 5e-7],
            planning: [2e-9, 3e-9, 4e-9],
        }
    }

    #[test]
    fn figures_of_a_host_are_those_that_its_times_were_made_of() {
        let hardware = figures().hardware().unwrap();
        hardware.check().unwrap();
        assert_eq!(hardware.engines.peer, [CopyCost { from_bytes: 0, per_copy: 1000, rate: 1000 }]);
        assert_eq!((hardware.compute.rate, hardware.nic.latency), (1000, 500));
        let Host { signal, latency, sort, place, per_bin, .. } = hardware.host;
        assert_eq!((signal, latency, sort, place, per_bin), (100, 300, 2000, 3000, 4000));
    }

    #[test]
    fn long_rows_as_fast_as_short_ones_make_no_machine() {
        let mut figures = figures();
        figures.loops[1].copy = figures.loops[0].copy;
        assert_eq!(figures.hardware(), None);
    }
}
