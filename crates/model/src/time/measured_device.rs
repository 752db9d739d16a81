//! A machine with the figures of one GPU, from what was measured on it.

use super::{CopyCost, Hardware};

/// Figures measured on a GPU, in microseconds.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceFigures {
    /// Copies to the host and within the GPU, by bytes, the smallest first: one among many.
    pub copies: [Vec<(u64, f64)>; 2],
    /// A copy alone, and the same among many.
    pub batch: [f64; 2],
    /// A word alone, and the same among many.
    pub list: [f64; 2],
    /// From a stream to another.
    pub signal: f64,
    /// The host's part of a copy and of a word, among many.
    pub enqueue: [f64; 2],
    /// A million bytes read and written by a kernel.
    pub megabyte: f64,
    /// A choice of many that are sorted.
    pub choice: f64,
    /// A kernel of next to no work.
    pub kernel: f64,
}

/// Names of the figures of a machine that these give.
const FIGURES: [&str; 11] = [
    "engines.host",
    "engines.own",
    "engines.per_batch",
    "engines.per_list",
    "engines.per_word",
    "engines.enqueue_copy",
    "engines.enqueue_word",
    "link.latency",
    "compute.rate",
    "compute.sort",
    "compute.launch",
];

impl Hardware {
    /// This machine with the figures of a GPU of this name, which are from this source.
    pub fn with_device(mut self, name: &str, figures: &DeviceFigures, source: &str) -> Hardware {
        name.clone_into(&mut self.name);
        // Peaks are another GPU's: nothing here says what this one has.
        self.peaks = None;
        self.sources.retain(|known| !known.figures.iter().any(|figure| figure == "peaks"));
        let ([alone, together], [one, listed]) = (figures.batch, figures.list);
        let [to_host, within] = &figures.copies;
        let engines = &mut self.engines;
        (engines.host, engines.own) = (costs(to_host), costs(within));
        (engines.per_batch, engines.per_list) = (ns(alone - together), ns(one - listed));
        engines.per_word = ns(listed);
        [engines.enqueue_copy, engines.enqueue_word] = figures.enqueue.map(ns);
        self.link.latency = ns(figures.signal - 2.0 * listed);
        self.compute.rate = rate(1e6, figures.megabyte);
        (self.compute.sort, self.compute.launch) = (ns(figures.choice * 1e3), ns(figures.kernel));
        self.set_source(&FIGURES, source);
        self
    }
}

/// The price is that of the smallest copy. Each rate holds from its size on.
fn costs(copies: &[(u64, f64)]) -> Vec<CopyCost> {
    let per_copy = copies.first().map_or(0, |&(_, us)| ns(us));
    let cost = |(nth, &(bytes, us)): (usize, &(u64, f64))| CopyCost {
        from_bytes: if nth == 0 { 0 } else { bytes },
        per_copy,
        rate: rate(bytes as f64, us),
    };
    copies.iter().enumerate().map(cost).collect()
}

/// A price that the model takes, on any driver: kernels of the fake one may take seconds.
fn ns(us: f64) -> u64 {
    (us * 1e3).round().clamp(0.0, Hardware::MAX_PRICE as f64) as u64
}

/// MB/s of so many bytes.
fn rate(bytes: f64, us: f64) -> u64 {
    (bytes / us.max(1e-6)).round().max(1.0) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_of_a_gpu_take_the_place_of_those_of_the_machine() {
        let figures = DeviceFigures {
            copies: [vec![(4096, 2.0), (1 << 20, 40.0)], vec![(4096, 1.0)]],
            batch: [5.0, 2.0],
            list: [1.5, 0.5],
            signal: 3.0,
            enqueue: [0.4, 0.3],
            megabyte: 0.5,
            choice: 0.002,
            kernel: 2.5,
        };
        let known: Hardware = "h100-cx7".parse().unwrap();
        let made = known.clone().with_device("a GPU", &figures, "measured: here");
        made.check().unwrap();
        let rates = made.engines.host.iter().map(|cost| (cost.from_bytes, cost.per_copy, cost.rate));
        assert_eq!(rates.collect::<Vec<_>>(), [(0, 2000, 2048), (1 << 20, 2000, 26_214)]);
        let engines = &made.engines;
        assert_eq!((engines.per_batch, engines.per_list, engines.per_word), (3000, 1000, 500));
        assert_eq!((made.link.latency, made.compute.rate, made.compute.sort), (2000, 2_000_000, 2000));
        assert_eq!((made.peaks, made.source_of("compute.launch")), (None, Some("measured: here")));
        assert_eq!((&made.engines.peer, &made.nic), (&known.engines.peer, &known.nic));
    }
}
