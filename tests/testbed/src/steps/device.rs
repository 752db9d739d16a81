//! Rows between devices of two machines: a fake CUDA driver on both, whose memory the NICs access.
//! It has no dma-bufs, and the ranks report it: the memory is registered by its address.

use super::{Asked, Findings};
use crate::bed::Bed;
use crate::deadline::Deadline;
use crate::error::Result;
use crate::sidelane::{Straight, device};

pub fn run(bed: &mut Bed, _: &Asked, deadline: Deadline) -> Result<Findings> {
    let mut all = Straight::default();
    for output in bed.both(device, deadline)? {
        let Straight { rounds, bytes } = Straight::read(&output.stdout)?;
        all = Straight { rounds: all.rounds + rounds, bytes: all.bytes + bytes };
    }
    let Straight { rounds, bytes } = all;
    Ok(Findings::from(format!(
        "{rounds} rounds to the bit, direct and pxn, exact and budget, and slots; {bytes} bytes of rows from device to device, no host staging; \
         registered by address: no dma-bufs"
    )))
}
