//! Devices as rooflines see them: a few rates, from the hardware files of the time model.

use serde::Serialize;

use crate::time::Hardware;

/// Rates of the devices of a job.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Devices {
    /// Name of the hardware.
    pub name: String,
    /// Products of one device, in operations per second: `C` of the scaling book.
    pub flops: f64,
    /// Memory of one device.
    pub memory_bytes: u64,
    /// Rate at which kernels read and write this memory, in bytes per second.
    pub memory_rate: f64,
    /// Wires within a node.
    pub fabric: Fabric,
    /// Rate at which one device receives from its node, over one axis of a torus, in bytes per
    /// second: `W` of the scaling book.
    pub link_rate: f64,
    /// Devices of a node; of a torus, of a pod.
    pub per_node: u32,
    /// Rate of one device to other nodes, in bytes per second.
    pub nic_rate: f64,
}

/// Wires that join the devices of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum Fabric {
    /// One link to a switch, which all transfers of a device share.
    Switch,
    /// A link along each axis: groups on different axes do not share them.
    Torus {
        /// Number of axes.
        axes: u32,
    },
}

/// Hardware that has no peaks: it times calls, and no models.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name} has no `peaks` (tflops, memory_bytes), which rooflines need")]
pub struct NoPeaks {
    /// Name of the hardware.
    pub name: String,
}

impl Devices {
    /// Name of [`Devices::tpu_v5p`].
    pub const TPU_V5P: &str = "tpu-v5p";

    /// Devices of a hardware file, so many a node. Transfers go at `link.rate` in a node, and each
    /// device has its share of the node's NICs.
    ///
    /// # Errors
    /// [`NoPeaks`] if the file does not say what a device computes and holds.
    pub fn of(hardware: &Hardware, per_node: u32) -> Result<Self, NoPeaks> {
        let peaks = hardware.peaks.ok_or_else(|| NoPeaks { name: hardware.name.clone() })?;
        let nics = match hardware.nic.per_node {
            0 => 1.0,
            nics => f64::from(nics.min(per_node)) / f64::from(per_node),
        };
        let rate = |megabytes: u64| megabytes as f64 * 1e6;
        Ok(Devices {
            name: hardware.name.clone(),
            flops: f64::from(peaks.tflops) * 1e12,
            memory_bytes: peaks.memory_bytes,
            memory_rate: rate(hardware.compute.rate),
            fabric: Fabric::Switch,
            link_rate: rate(hardware.link.rate),
            per_node,
            nic_rate: rate(hardware.nic.rate) * nics,
        })
    }

    /// TPU v5p, with the figures of the scaling book (jax-ml, "How to Parallelize a Transformer for
    /// Training" and "How to Think About TPUs"): 4.59e14 bf16 operations per second, 96 GB at
    /// 2.765e12 B/s, 1.8e11 B/s along each axis of a torus of 8,960 chips in both directions, and
    /// 6.25e9 B/s a chip to other pods. The time model has no file of it, so experts stay on their
    /// ranks there.
    pub fn tpu_v5p() -> Self {
        Devices {
            name: Self::TPU_V5P.to_owned(),
            flops: 4.59e14,
            memory_bytes: 96_000_000_000,
            memory_rate: 2.765e12,
            fabric: Fabric::Torus { axes: 3 },
            link_rate: 1.8e11,
            per_node: 8_960,
            nic_rate: 6.25e9,
        }
    }

    /// Operations for each byte that one axis brings: `C / W`.
    pub fn intensity(&self) -> f64 {
        self.flops / self.link_rate
    }

    /// Axes of a data parallel group, and those of a tensor parallel one. A group that is alone has
    /// all; else the tensor parallel group has one, as in the book.
    pub fn axes(&self, has_data: bool, has_tensor: bool) -> (u32, u32) {
        match self.fabric {
            Fabric::Switch => (1, 1),
            Fabric::Torus { axes } if has_data && has_tensor => ((axes - 1).max(1), 1),
            Fabric::Torus { axes } => (axes, axes),
        }
    }
}
