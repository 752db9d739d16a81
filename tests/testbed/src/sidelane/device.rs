//! Ranks whose rows lie in device memory of a fake CUDA driver: a test of the library, started once
//! per rank.

use super::{CALM, Nics, command, demand_passes, unreadable};
use crate::error::Result;
use crate::image::KERNELS;

/// The test that plays a rank.
const TEST: &str = "ep::device::tests::rows_go_from_device_to_device_between_two_machines";

/// Ways in which rows go: two routes, exact sizes and a budget; and slots.
const WAYS: usize = 5;

/// Report of the ranks of a machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Straight {
    /// Rounds of dispatch and combine, each compared to the bit.
    pub rounds: u64,
    /// Bytes that NICs read from device memory here and wrote to device memory there.
    pub bytes: u64,
}

/// The ranks of one machine.
pub fn device(machine: usize) -> String {
    let start = command(machine, 2, "launch --tag-output", Nics::First, CALM);
    format!(
        "export SIDELANE_FAKE_CUDA_KERNELS={KERNELS} CUDA_MODULE_LOADING=EAGER && {start} -- \
         sidelane-tests --ignored --nocapture --exact {TEST}"
    )
}

impl Straight {
    /// What both ranks of a machine have said, of each way.
    pub fn read(output: &str) -> Result<Self> {
        demand_passes(output, 2)?;
        let missing = || unreadable("how many bytes of each of two ranks went straight", output.to_owned());
        let ends: Vec<&str> = output.lines().filter(|line| line.ends_with("bytes straight")).collect();
        let mut all = Self::default();
        for line in &ends {
            let mut numbers = line.split_whitespace().filter_map(|word| word.parse::<u64>().ok());
            all.rounds += numbers.next().filter(|&rounds| rounds > 0).ok_or_else(missing)?;
            all.bytes += numbers.next().filter(|&bytes| bytes > 0).ok_or_else(missing)?;
        }
        if ends.len() == 2 * WAYS { Ok(all) } else { Err(missing()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rank_must_pass_and_send_bytes_straight_in_each_way() {
        let mut output = String::new();
        for (rank, way) in (0..2).flat_map(|rank| (0..WAYS).map(move |way| (rank, way))) {
            output +=
                &format!("[{rank}] way{way} exact: 20 rounds to the bit, {} bytes straight\n", 100 + way);
        }
        output += "[0] test result: ok. 1 passed; 0 failed\n[1] test result: ok. 1 passed; 0 failed\n";
        assert_eq!(Straight::read(&output).unwrap(), Straight { rounds: 200, bytes: 1020 });
        for (what, with) in
            [("100 bytes", "0 bytes"), ("way3", "way3 bytes straight\n"), ("[1] test", "[1] no")]
        {
            let broken = output.replacen(what, with, 1);
            assert!(Straight::read(&broken).is_err(), "{with}");
        }
    }
}
