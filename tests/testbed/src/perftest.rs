//! The baseline: perftest's programs, and how to read them.

use serde::Serialize;

use crate::bed::{Bed, master};
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::tool::tail;

/// How often a run without a clock is taken again.
const TRIES: u32 = 5;

/// A program of perftest with its size.
#[derive(Clone, Copy, Debug)]
pub struct Perftest {
    /// Measured operation.
    pub kind: Kind,
    /// Bytes a message.
    pub size: usize,
    /// Messages a run.
    pub iterations: usize,
}

/// Measured operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Half a ping-pong of writes.
    Latency,
    /// A stream of writes.
    Bandwidth,
}

impl Perftest {
    /// The program's name.
    pub fn program(&self) -> &'static str {
        match self.kind {
            Kind::Latency => "ib_write_lat",
            Kind::Bandwidth => "ib_write_bw",
        }
    }

    /// The command of the side that waits; the other side's is the same with the address of this
    /// one at its end.
    pub fn command(&self, port: u16) -> String {
        // GID 1 is the one of the IPv4 address; no error about the clock (-F); a virtual NIC may be
        // unresponsive for longer than the usual 67 ms without a loss, so it sends again only after
        // a second (-u 18).
        format!("{} -d rxe0 -x 1 -F -u 18 -s {} -n {} -p {port}", self.program(), self.size, self.iterations)
    }

    /// Runs it from machine 1 to machine 0.
    ///
    /// perftest measures the processor's clock first. On a busy host it sometimes fails silently,
    /// and all its times are infinite: such a run is repeated.
    pub fn run(&self, bed: &Bed, port: u16, deadline: Deadline) -> Result<Reading> {
        let mut tries = 1..=TRIES;
        loop {
            let server = bed.start(0, self.command(port))?;
            bed.listening(0, port, deadline)?;
            let client = bed.start(1, format!("{} {}", self.command(port), master()))?;
            let client = client.succeed(deadline)?;
            server.succeed(deadline)?;
            let reading = self.read(&client.stdout)?;
            if reading.has_clock() {
                return Ok(reading);
            }
            tries.next().ok_or_else(|| self.unreadable("times by a clock", &client.stdout))?;
        }
    }

    /// The figure of a run: microseconds (the least, the median), or MiB/s (the average, twice).
    pub fn read(&self, output: &str) -> Result<Reading> {
        let figures: Option<Vec<f64>> = output
            .lines()
            .skip_while(|line| !line.trim_start().starts_with("#bytes"))
            .nth(1)
            .and_then(|line| line.split_whitespace().map(|word| word.parse().ok()).collect());
        let reading = figures.and_then(|figures| match self.kind {
            Kind::Latency => Some(Reading { best: *figures.get(2)?, typical: *figures.get(4)? }),
            Kind::Bandwidth => Some(Reading { best: *figures.get(2)?, typical: *figures.get(3)? }),
        });
        reading.ok_or_else(|| self.unreadable("the line of figures", output))
    }

    fn unreadable(&self, what: &'static str, output: &str) -> Error {
        Error::Unreadable { program: self.program(), what, output: tail(output, 10) }
    }
}

/// The figures of one run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Reading {
    /// The least latency, the highest bandwidth.
    pub best: f64,
    /// The median latency, the average bandwidth.
    pub typical: f64,
}

impl Reading {
    /// Without a clock, latencies are infinite and bandwidths zero.
    fn has_clock(self) -> bool {
        self.typical.is_normal()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LATENCY: &str = "\
 local address: LID 0000 QPN 0x0011 PSN 0x8d1d31 RKey 0x000203 VAddr 0x00556c2b5ef000
---------------------------------------------------------------------------------------
 #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]   99% percentile[usec]   99.9% percentile[usec]
 8       100          244.31         4103.20      262.87              301.44      12.10           3900.00                 4103.20
---------------------------------------------------------------------------------------
";
    const BANDWIDTH: &str = "\
 #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]
 1048576    20               35.20              33.17              0.000033
";

    fn program(kind: Kind) -> Perftest {
        Perftest { kind, size: 8, iterations: 100 }
    }

    #[test]
    fn latency_is_read_from_its_columns() {
        let reading = program(Kind::Latency).read(LATENCY).unwrap();
        assert_eq!(reading, Reading { best: 244.31, typical: 262.87 });
    }

    #[test]
    fn bandwidth_is_read_from_its_columns() {
        let reading = program(Kind::Bandwidth).read(BANDWIDTH).unwrap();
        assert_eq!(reading, Reading { best: 35.20, typical: 33.17 });
    }

    #[test]
    fn a_run_without_a_clock_is_known_by_its_figures() {
        let reading =
            program(Kind::Latency).read(&LATENCY.replace("244.31", "inf").replace("262.87", "inf")).unwrap();
        assert!(!reading.has_clock());
        assert!(!Reading { best: 0.0, typical: 0.0 }.has_clock());
        assert!(program(Kind::Latency).read(LATENCY).unwrap().has_clock());
    }

    #[test]
    fn output_without_figures_is_an_error_that_shows_it() {
        for text in ["", "Couldn't connect", " #bytes #iterations\n---\n"] {
            let error = program(Kind::Latency).read(text).unwrap_err();
            assert!(matches!(error, Error::Unreadable { program: "ib_write_lat", .. }));
        }
    }
}
