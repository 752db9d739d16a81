//! Kernels at the size of a step, as `gpu-check` times them, and the copies that it audits with.

use sidelane::device::AuditKernels;
use sidelane_testkit::device::kernel_work::{ExactWork, SlotWork};
use sidelane_testkit::device::kernels::copies;

use super::with_kernels;

#[test]
fn pack_regroup_and_sum_bits_are_same_for_any_block_count() {
    let test = "kernels::work::pack_regroup_and_sum_bits_are_same_for_any_block_count";
    with_kernels(test, |device| {
        let gpu = device.bench().gpu;
        SlotWork::new(&gpu).unwrap().equal(&gpu, &[None, Some(4), Some(2)]).unwrap();
    });
}

#[test]
fn kernels_of_exact_sizes_find_no_fault_in_choices_of_a_step() {
    let test = "kernels::work::kernels_of_exact_sizes_find_no_fault_in_choices_of_a_step";
    with_kernels(test, |device| {
        let gpu = device.bench().gpu;
        let rows = SlotWork::new(&gpu).unwrap();
        let exact = ExactWork::new(&rows, &gpu).unwrap();
        exact.count(&rows).unwrap();
        exact.sort(&rows, false).unwrap();
        exact.sort(&rows, true).unwrap();
        exact.permute(&rows, exact.choices).unwrap();
        exact.sum(&rows).unwrap();
        rows.check_status(&gpu).unwrap();
    });
}

#[test]
fn kernels_of_the_audit_copy_and_multiply_to_the_bit() {
    let test = "kernels::work::kernels_of_the_audit_copy_and_multiply_to_the_bit";
    with_kernels(test, |device| {
        let (bench, audit) = (device.bench(), AuditKernels::load(&device.context).unwrap());
        for (bytes, most) in [(16, None), (4096, Some(1)), (70_000, Some(3)), (70_000, None)] {
            copies::copy(&bench, &audit, bytes, most).unwrap();
        }
        copies::product(&bench, 128, |product| audit.product(&bench.stream, product)).unwrap();
    });
}
