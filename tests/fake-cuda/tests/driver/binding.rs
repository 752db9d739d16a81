//! The binding's own safe layer on top of the fake: no symbol is missing, and its copies arrive.

use cudarc::driver::CudaContext;

use crate::common::*;

#[test]
fn the_bindings_safe_layer_runs() {
    apart("binding::the_bindings_safe_layer_runs", &seeds(2), || {
        let context = CudaContext::new(0).unwrap();
        let fake_driver = fake_cuda::FakeDriver::loaded().unwrap();
        assert_eq!(context.name().unwrap(), "Sidelane fake");
        let (first, second) = (context.default_stream(), context.new_stream().unwrap());
        let there: Vec<u32> = (0..1000).collect();
        let on_device = second.clone_htod(&there).unwrap();
        let copied = first.clone_dtod(&on_device).unwrap();
        assert_eq!(first.clone_dtoh(&copied).unwrap(), there);
        second.synchronize().unwrap();
        context.check_err().unwrap();
        assert!(fake_driver.counters().copies >= 3);
    });
}
