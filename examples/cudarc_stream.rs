//! A dispatch and a combine on a stream and in buffers of cudarc, as servers in Rust have them.
//!
//! ```text
//!   CudaContext   the primary context of its device    Driver::open()?.context(device)    the same one
//!   CudaStream    cu_stream()                          Stream::borrow                     work goes there in order
//!   CudaSlice     device_ptr()                         DeviceRange::of_caller             kept until no work needs it
//! ```
//!
//! Nothing is copied or wrapped by cudarc, and nothing by Sidelane. The experts give every row back
//! as it is, so each token comes back once for each of its experts. Run it on a machine with GPUs,
//! with a thread for each rank:
//!
//! ```text
//!   cargo run --release --example cudarc_stream
//! ```

#![allow(unsafe_code, reason = "streams and memory of another owner are named by contract")]

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr, DriverError, result};
use sidelane::device::{DeviceRange, Driver, Stream};
use sidelane::ep::{Choices, Tensor, TensorMut};
use sidelane::error::DeviceError;
use sidelane::{Dtype, ExpertParallel, World};

const RANKS: u32 = 2;
const EXPERTS: u32 = 4;
const TOP_K: u32 = 2;
const HIDDEN: usize = 64;
const TOKENS: usize = 100;

/// An error of either library.
#[derive(Debug)]
pub enum Failure {
    /// Of cudarc.
    Cudarc(DriverError),
    /// Of Sidelane.
    Sidelane(sidelane::Error),
}

impl From<DriverError> for Failure {
    fn from(error: DriverError) -> Self {
        Failure::Cudarc(error)
    }
}

impl From<sidelane::Error> for Failure {
    fn from(error: sidelane::Error) -> Self {
        Failure::Sidelane(error)
    }
}

impl From<DeviceError> for Failure {
    fn from(error: DeviceError) -> Self {
        Failure::Sidelane(error.into())
    }
}

type Outcome<T> = Result<T, Failure>;

fn main() -> Outcome<()> {
    for line in on_threads()? {
        println!("{line}");
    }
    Ok(())
}

/// Ranks that are threads, each with a device of its own where there are as many; what each has to
/// say.
pub fn on_threads() -> Outcome<Vec<String>> {
    let ranks = World::threads(RANKS)?.into_iter().map(|world| std::thread::spawn(move || layer_on(&world)));
    let ranks: Vec<_> = ranks.collect();
    ranks.into_iter().map(|rank| rank.join().expect("a rank panicked")).collect()
}

/// One layer on a rank: the buffers and the stream are cudarc's.
fn layer_on(world: &World) -> Outcome<String> {
    let device = world.rank() as usize % CudaContext::device_count()?.max(1) as usize;
    let cuda = CudaContext::new(device)?;
    // SAFETY: all buffers are used on one stream. cudarc's events would not see Sidelane's work.
    unsafe { cuda.disable_event_tracking() };
    let stream = cuda.new_stream()?;

    let first = world.rank() as usize * TOKENS;
    let tokens: Vec<f32> = (0..TOKENS * HIDDEN).map(|nth| ((first * HIDDEN + nth) % 1009) as f32).collect();
    let choices = |nth: usize| ((first + nth / 2) as i32 + nth as i32 % 2) % EXPERTS as i32;
    let experts: Vec<i32> = (0..TOKENS * TOP_K as usize).map(choices).collect();
    let x = Arc::new(stream.clone_htod(&tokens)?);
    let experts = Arc::new(stream.clone_htod(&experts)?);
    let weights = Arc::new(stream.clone_htod(&[0.5_f32; TOKENS * TOP_K as usize])?);
    let out = Arc::new(stream.alloc_zeros::<f32>(TOKENS * HIDDEN)?);

    let context = Driver::open()?.context(device as u32)?;
    // SAFETY: the handle is valid until `stream` is dropped, at the end of this function.
    let on = Arc::new(unsafe { Stream::borrow(&context, stream.cu_stream().cast()) }?);
    let group = world.all()?;
    let builder = ExpertParallel::builder(&group);
    let builder = builder.experts(EXPERTS).top_k(TOP_K).hidden(HIDDEN);
    let mut ep = builder.dtype(Dtype::F32).max_tokens(TOKENS as u32).on(&on).build()?;

    let [of_x, of_out] = [&x, &out].map(|slice| range(&stream, slice));
    let (experts, weights) = (range(&stream, &experts), range(&stream, &weights));
    let choices = Choices::Device { experts: &experts, weights: &weights };
    let (rows, handle) = ep.dispatch(Tensor::device(&of_x, Dtype::F32), choices)?;
    let (landed, y) = (rows.range()?, handle.output()?);
    // Here goes your grouped product, by handle.tokens_per_expert(). Ours is a copy.
    let bytes = handle.rows() as usize * HIDDEN * size_of::<f32>();
    cuda.bind_to_thread()?;
    if bytes > 0 {
        let (to, from) = (y.range()?.address(), landed.address());
        // SAFETY: both have as many rows, and both stay until the stream has passed: `rows` is
        // dropped behind the combine, and `y` goes to it.
        unsafe { result::memcpy_dtod_async(to, from, bytes, stream.cu_stream()) }?;
    }
    ep.combine_into(y, &handle, TensorMut::device(&of_out, Dtype::F32))?;
    drop(rows);

    // cudarc's own copy goes behind the combine, in the same stream.
    let seen = stream.clone_dtoh(&*out)?;
    ep.synchronize()?;
    let right = seen.iter().zip(&tokens).all(|(&seen, &token)| seen == TOP_K as f32 * token);
    let verdict = if right { "the sums are right" } else { "THE SUMS ARE WRONG" };
    Ok(format!("rank {} on device {device}: {TOKENS} tokens, {verdict}", world.rank()))
}

/// A buffer of cudarc's, as Sidelane takes it: it stays until no stream needs it.
fn range<T: Send + Sync + 'static>(stream: &CudaStream, slice: &Arc<CudaSlice<T>>) -> DeviceRange {
    let (address, _) = slice.device_ptr(stream);
    let (bytes, device) = (slice.num_bytes() as u64, slice.ordinal() as u32);
    let keep = Arc::<CudaSlice<T>>::clone(slice);
    // SAFETY: the memory lives as long as the slice, on this device.
    unsafe { DeviceRange::of_caller(address, bytes, &[device], keep) }
}
