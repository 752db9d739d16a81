//! Streams and buffers of cudarc: the example of the repository, as it stands.

#[allow(dead_code, reason = "its main is the example's")]
#[path = "../../../examples/cudarc_stream.rs"]
mod example;

use super::on_drivers;

#[test]
fn stream_and_buffers_of_cudarc_need_no_wrapper() {
    let test = "enqueued::cudarc::stream_and_buffers_of_cudarc_need_no_wrapper";
    on_drivers(test, &["12080"], 8, 3, &|| {
        let said = example::on_threads().unwrap();
        assert!(said.len() == 2 && said.iter().all(|line| line.ends_with("the sums are right")), "{said:?}");
    });
}
