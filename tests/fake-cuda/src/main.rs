//! Prints the environment that gives a program devices:
//! `cargo run -p fake-cuda -- cuda/exchange.cu`.

use std::error::Error;
use std::path::Path;

fn main() -> Result<(), Box<dyn Error>> {
    let source = std::env::args_os().nth(1).ok_or("usage: fake-cuda <source of the kernels>")?;
    let directory = fake_cuda::install()?;
    let kernels = fake_cuda::kernels(&std::fs::canonicalize(Path::new(&source))?)?;
    println!("LD_LIBRARY_PATH={}", directory.display());
    println!("SIDELANE_CUDA_LIBRARY={}", directory.join("libcuda.so.1").display());
    println!("SIDELANE_FAKE_CUDA_KERNELS={}", kernels.display());
    println!("CUDA_MODULE_LOADING=EAGER");
    Ok(())
}
