//! A step of training of one rank, made on the host, and compared on the device in everything that
//! is seen of it.

use std::sync::Arc;

use sidelane::device::DeviceRange;
use sidelane::ep::{Choices, ExpertOutput, ExpertRows, Handle, HeapAllocator, Tensor, TensorMut};
use sidelane::gate::Routing;
use sidelane::plan::RowLayout;
use sidelane::{Dtype, Element};

use super::devices::Memory;
use super::rank::{Case, Input, Rank, call, target};
use super::support::layer::bits;
use super::support::{To, tokens};

/// What a step has to bring, and what experts make of it. All of it is the host's.
pub struct Step<E> {
    pub input: Input<E>,
    /// Other tokens of the same choices, and gradients of the sums.
    pub again: Vec<E>,
    pub gradients: Vec<E>,
    /// What experts make: of rows, and of gradients.
    pub y: Vec<E>,
    pub of_rows: Vec<E>,
    pub of_weights: Vec<f32>,
    /// What comes back.
    pub sums: Vec<E>,
    pub rows_again: Vec<E>,
    pub of_sums: Vec<E>,
    pub of_combine: Option<Vec<f32>>,
    pub of_tokens: Vec<E>,
    pub of_choices: Vec<f32>,
    pub row_weights: Vec<f32>,
    pub row_experts: Vec<i32>,
    pub per_expert: Vec<i64>,
}

impl<E: Element + Into<f32>> Rank<E>
where
    f32: To<E>,
{
    /// A step on the host.
    pub fn expected(&mut self, seed: u64, count: u32) -> Step<E> {
        let Case { top_k, hidden, .. } = self.case;
        let experts = self.case.map.experts();
        let input: Input<E> = tokens(seed, count, hidden, top_k, experts);
        let [again, gradients] = [1, 2].map(|n| tokens(seed + n * 997, count, hidden, top_k, experts).x);
        let routing = Routing::new(top_k, input.ids.as_slice(), input.weights.as_slice()).unwrap();
        let (rows, handle) = self.host.dispatch(&input.x, &routing).unwrap();
        let made = |rank: &Self, rows: &[E]| -> Vec<E> {
            rows.iter().enumerate().map(|(at, &value)| rank.expert(at / hidden, value)).collect()
        };
        let y = made(self, rows.rows().unwrap());
        let sums = self.host.combine(&y, &handle).unwrap();
        let rows_again = self.host.dispatch_cached(&again, &handle).unwrap().to_vec().unwrap();
        let (back, of_combine) = self.host.combine_backward(&gradients, &handle).unwrap();
        let of_sums: Vec<E> = back.to_vec().unwrap();
        let of_rows = made(self, &of_sums);
        let words = handle.row_weights().len();
        let of_weights: Vec<f32> = (0..words).map(|word| word as f32 / 3.0 - seed as f32).collect();
        let returned = self.host.dispatch_backward(&of_rows, Some(&of_weights), &handle).unwrap();
        let (row_weights, row_experts) = (handle.row_weights().to_vec(), handle.row_experts().to_vec());
        let per_expert = handle.tokens_per_expert().to_vec();
        let (of_tokens, of_choices) = (returned.0, returned.1.unwrap());
        Step {
            input,
            again,
            gradients,
            y,
            of_rows,
            of_weights,
            sums,
            rows_again,
            of_sums,
            of_combine,
            of_tokens,
            of_choices,
            row_weights,
            row_experts,
            per_expert,
        }
    }

    /// Memory of the device with this content.
    pub fn lent<T: bytemuck::NoUninit>(&self, content: &[T]) -> DeviceRange {
        let len = (size_of_val(content) as u64).max(16);
        Memory::new(self.stream.context(), len).fill(&self.stream, content)
    }

    /// What lies there when the stream comes to it.
    pub fn seen<T: bytemuck::Pod>(&self, range: &DeviceRange) -> Vec<T> {
        self.rows.read(&self.stream, range)
    }

    /// Room for as many elements, full of something else.
    pub fn room<T: bytemuck::NoUninit>(&self, like: &[T]) -> DeviceRange {
        self.lent(&vec![0xcb_u8; size_of_val(like)])
    }

    pub fn same_rows(&self, rows: &ExpertRows, expected: &[E], step: &Step<E>, what: &str) {
        let landed = rows.range().unwrap();
        assert_eq!(bits(&self.seen::<E>(&landed)), bits(expected), "{what}");
        let weights = rows.weights().unwrap();
        assert_eq!(bits(&self.seen::<f32>(&weights)), bits(&step.row_weights), "weights of {what}");
        if self.case.layout == RowLayout::RankMajor {
            assert_eq!(self.seen::<i32>(rows.experts().unwrap()), step.row_experts, "experts of {what}");
        }
        let counts = self.seen::<i64>(&rows.counts().unwrap());
        assert_eq!(counts[..step.per_expert.len()], step.per_expert, "counts of {what}");
    }

    pub fn output(&self, handle: &Handle, content: &[E]) -> ExpertOutput {
        let y = handle.output().unwrap();
        self.rows.send(&self.stream, y.range().unwrap(), bits(content));
        y
    }

    /// The forward pass on the device; its rows are given back.
    pub fn forward(&mut self, step: &Step<E>) -> Handle {
        let tensors = [bits(&step.input.x), bits(&step.input.ids), bits(&step.input.weights)];
        let tensors = tensors.map(|bytes| self.lent(bytes));
        let (x, choices) = call::<E>(&tensors);
        let (_, handle) = self.planned.dispatch(x, choices).unwrap();
        let (y, out) = (self.output(&handle, &step.y), self.room(&step.sums));
        self.planned.combine_into(y, &handle, target::<E>(&out)).unwrap();
        assert_eq!(bits(&self.seen::<E>(&out)), bits(&step.sums), "sums");
        handle
    }

    /// The same tokens again, and others, along the layout.
    pub fn again(&mut self, step: &Step<E>, handle: &Handle) {
        let x = self.lent(&step.again);
        let rows = self.planned.dispatch_cached(Tensor::device(&x, E::DTYPE), handle).unwrap();
        self.same_rows(&rows, &step.rows_again, step, "rows along a layout");
    }

    /// The backward pass on the device: twice, and the second time as on the host.
    pub fn backward(&mut self, step: &Step<E>, handle: &Handle) {
        let g = self.lent(&step.gradients);
        let returned = step.of_combine.as_ref().map(|weights| self.room(weights));
        for _ in 0..2 {
            let weights = returned.as_ref().map(|returned| TensorMut::device(returned, Dtype::F32));
            let gradients = Tensor::device(&g, E::DTYPE);
            let rows = self.planned.combine_backward_into(gradients, handle, weights).unwrap();
            self.same_rows(&rows, &step.of_sums, step, "gradients of rows");
        }
        if let (Some(returned), Some(expected)) = (&returned, &step.of_combine) {
            assert_eq!(bits(&self.seen::<f32>(returned)), bits(expected), "gradients of weights");
        }
        let (of_rows, of_weights) = (self.output(handle, &step.of_rows), self.lent(&step.of_weights));
        let (x, returned) = (self.room(&step.of_tokens), self.room(&step.of_choices));
        let weights = Some(TensorMut::device(&returned, Dtype::F32));
        let given = Some(Tensor::device(&of_weights, Dtype::F32));
        let planned = &mut self.planned;
        planned.dispatch_backward_into(of_rows, given, handle, target::<E>(&x), weights).unwrap();
        assert_eq!(bits(&self.seen::<E>(&x)), bits(&step.of_tokens), "gradients of tokens");
        assert_eq!(bits(&self.seen::<f32>(&returned)), bits(&step.of_choices), "gradients of choices");
        // Without weights, and with rows that lie elsewhere.
        let (elsewhere, x) = (self.lent(&step.of_rows), self.room(&step.of_tokens));
        let y = Tensor::device(&elsewhere, E::DTYPE);
        self.planned.dispatch_backward_into(y, None, handle, target::<E>(&x), None).unwrap();
        assert_eq!(bits(&self.seen::<E>(&x)), bits(&step.of_tokens), "the same without weights");
    }

    /// A step in fp8: tokens that packing makes records of, and records that were made before, land
    /// as on the host; what comes back is rows.
    pub fn step_in_records(&mut self, seed: u64, count: u32) {
        let Case { top_k, hidden, .. } = self.case;
        let experts = self.case.map.experts();
        let input: Input<E> = tokens(seed, count, hidden, top_k, experts);
        let again: Vec<E> = tokens(seed + 997, count, hidden, top_k, experts).x;
        let routing = Routing::new(top_k, input.ids.as_slice(), input.weights.as_slice()).unwrap();
        let mut records = [Vec::new(), Vec::new()];
        for (records, x) in records.iter_mut().zip([&input.x, &again]) {
            self.host.quantize(x, records).unwrap();
        }
        let (rows, handle) = self.host.dispatch(&records[0], &routing).unwrap();
        let rows_again: Vec<u8> = self.host.dispatch_cached(&records[1], &handle).unwrap().to_vec().unwrap();
        let rows: Vec<u8> = rows.to_vec().unwrap();
        let y: Vec<E> = (0..handle.rows() as usize * hidden)
            .map(|at| self.expert(at / hidden, ((at % 37) as f32 - 11.0).to()))
            .collect();
        let sums: Vec<E> = self.host.combine(&y, &handle).unwrap();
        let (back, of_combine) = self.host.combine_backward(&again, &handle).unwrap();
        let back: Vec<E> = back.to_vec().unwrap();
        let (of_tokens, _) = self.host.dispatch_backward::<E>(&y, None, &handle).unwrap();

        let tensors = [bits(&input.x), bits(&input.ids), bits(&input.weights)].map(|b| self.lent(b));
        let (x, choices) = call::<E>(&tensors);
        let packed = |experts: &ExpertRows| experts.range().unwrap();
        let (landed, of_rows) = self.planned.dispatch(x, choices).unwrap();
        assert_eq!(self.seen::<u8>(&packed(&landed)), rows, "records that packing made");
        assert_eq!(self.seen::<f32>(&landed.weights().unwrap()), handle.row_weights());
        let made = self.room(&records[0]).part(0, records[0].len() as u64).unwrap();
        self.planned.quantize_into(x, TensorMut::device(&made, Dtype::Bytes)).unwrap();
        assert_eq!(self.seen::<u8>(&made), records[0], "records that were asked for");
        let (landed, handle) = self.planned.dispatch(Tensor::device(&made, Dtype::Bytes), choices).unwrap();
        assert_eq!(self.seen::<u8>(&packed(&landed)), rows, "records that were made before");
        let others = self.lent(&records[1]).part(0, records[1].len() as u64).unwrap();
        let (plain, g) = (self.lent(&again), self.lent(&again));
        for x in [Tensor::device(&others, Dtype::Bytes), Tensor::device(&plain, E::DTYPE)] {
            let landed = self.planned.dispatch_cached(x, &handle).unwrap();
            assert_eq!(self.seen::<u8>(&packed(&landed)), rows_again, "records along a layout");
        }
        for handle in [&of_rows, &handle] {
            let (y_here, out) = (self.output(handle, &y), self.room(&sums));
            self.planned.combine_into(y_here, handle, target::<E>(&out)).unwrap();
            assert_eq!(bits(&self.seen::<E>(&out)), bits(&sums), "sums");
        }
        let returned = of_combine.as_ref().map(|weights| self.room(weights));
        let weights = returned.as_ref().map(|returned| TensorMut::device(returned, Dtype::F32));
        let gradients = Tensor::device(&g, E::DTYPE);
        let landed = self.planned.combine_backward_into(gradients, &handle, weights).unwrap();
        assert_eq!(bits(&self.seen::<E>(&packed(&landed))), bits(&back), "gradients of rows");
        if let (Some(returned), Some(expected)) = (&returned, &of_combine) {
            assert_eq!(bits(&self.seen::<f32>(returned)), bits(expected), "gradients of weights");
        }
        let (y, x) = (self.output(&handle, &y), self.room(&of_tokens));
        self.planned.dispatch_backward_into(y, None, &handle, target::<E>(&x), None).unwrap();
        assert_eq!(bits(&self.seen::<E>(&x)), bits(&of_tokens), "gradients of tokens");
        let kernels = of_rows.report().unwrap().kernels;
        let made = kernels.iter().any(|kernel| kernel.starts_with("records_"));
        assert_eq!(made, !input.x.is_empty(), "{kernels:?}");
    }

    /// Tokens in a buffer of the instance's: see [`Rank::go_from`].
    pub fn go_from_a_buffer(&mut self, input: &Input<E>, in_place: bool) {
        let buffer = self.planned.token_buffer((input.x.len() / self.case.hidden) as u32).unwrap();
        let range = buffer.range().unwrap().clone();
        self.go_from(input, in_place, &range, || drop(buffer));
    }

    /// Tokens amid memory of a heap allocator: see [`Rank::go_from`].
    pub fn go_from_an_allocation(&mut self, input: &Input<E>, in_place: bool) {
        let (allocator, stream) = (self.planned.heap_allocator().unwrap(), Arc::clone(&self.stream));
        let bytes = bits(&input.x).len() as u64;
        let range = allocator.alloc(192 + bytes + 64).unwrap();
        let address = range.address();
        let free = || HeapAllocator::free(address, &stream).unwrap();
        self.go_from(input, in_place, &range.part(192, bytes).unwrap(), free);
    }

    /// Tokens in memory of the instance's, which go as they lie or are packed, twice along one
    /// layout; then tokens elsewhere. Where some are dropped, the rank's are packed.
    fn go_from(&mut self, input: &Input<E>, in_place: bool, range: &DeviceRange, give_back: impl FnOnce()) {
        let top_k = self.case.top_k;
        let again: Vec<E> = input.x.iter().rev().copied().collect();
        let routing = Routing::new(top_k, input.ids.as_slice(), input.weights.as_slice()).unwrap();
        let (rows, handle) = self.host.dispatch(&input.x, &routing).unwrap();
        let rows: Vec<E> = rows.to_vec().unwrap();
        let rows_again: Vec<E> = self.host.dispatch_cached(&again, &handle).unwrap().to_vec().unwrap();
        let sums: Vec<E> = self.host.combine(&rows, &handle).unwrap();
        let in_place = in_place && !handle.dropped().contains(&true);

        let [ids, weights] = [bits(&input.ids), bits(&input.weights)].map(|bytes| self.lent(bytes));
        let (x, choices) =
            (Tensor::device(range, E::DTYPE), Choices::Device { experts: &ids, weights: &weights });
        self.rows.send(&self.stream, range, bits(&input.x));
        let (landed, handle) = self.planned.start_dispatch(x, choices).unwrap().finish().unwrap();
        // What is written next comes behind the call, and so does what is given back.
        self.rows.send(&self.stream, range, bits(&again));
        assert_eq!(bits(&self.seen::<E>(&landed.range().unwrap())), bits(&rows), "rows of tokens in place");
        let landed = self.planned.dispatch_cached(x, &handle).unwrap();
        give_back();
        assert_eq!(bits(&self.seen::<E>(&landed.range().unwrap())), bits(&rows_again), "along a layout");
        let elsewhere = self.lent(&input.x);
        let landed = self.planned.dispatch_cached(Tensor::device(&elsewhere, E::DTYPE), &handle).unwrap();
        assert_eq!(bits(&self.seen::<E>(&landed.range().unwrap())), bits(&rows), "tokens elsewhere");
        let (y, out) = (self.output(&handle, &rows), self.room(&sums));
        self.planned.combine_into(y, &handle, target::<E>(&out)).unwrap();
        assert_eq!(bits(&self.seen::<E>(&out)), bits(&sums), "sums");
        let report = handle.report().unwrap();
        assert!(!report.kernels.contains(&"plan_choices"), "the host knows tokens that lie in place");
        let regroups = report.kernels.iter().filter(|&&kernel| kernel == "regroup").count();
        let relayed = usize::from(landed.arrivals().is_some());
        // Own rows are placed by a kernel, also of tokens that go to other ranks as they lie.
        let placed = usize::from(report.enqueued.own_bytes > 0);
        assert_eq!(regroups, relayed + usize::from(!in_place) + placed, "{:?}", report.kernels);
    }

    /// Tokens in runs: token t of `count` goes to the expert at its place in the sequence or, if
    /// `top_k` is as many as there are, to all experts.
    pub fn in_runs(&self, seed: u64, count: u32) -> Input<E> {
        let Case { top_k, hidden, .. } = self.case;
        let experts = self.case.map.experts();
        let input: Input<E> = tokens(seed, count, hidden, top_k, experts);
        let id = |token: u32, k: u32| if top_k == 1 { token * experts / count } else { k } as i32;
        let ids = (0..count).flat_map(|token| (0..top_k).map(move |k| id(token, k))).collect();
        let weights = vec![0.5; (count * top_k) as usize];
        Input { ids, weights, ..input }
    }

    /// A layout whose tokens come later.
    pub fn prepared(&mut self, step: &Step<E>) {
        let [experts, weights] = [bits(&step.input.ids), bits(&step.input.weights)].map(|b| self.lent(b));
        let choices = Choices::Device { experts: &experts, weights: &weights };
        let handle = self.planned.prepare(choices).unwrap();
        let of_row = if self.case.layout == RowLayout::RankMajor { self.case.top_k } else { 1 };
        assert_eq!((handle.rows() * of_row) as usize, step.row_weights.len());
        self.again(step, &handle);
    }

    /// Two steps of random tokens that are alive at a time, and a layout whose tokens come later.
    pub fn steps(&mut self, [one, two]: [(u64, u32); 2]) {
        let all = [one, two].map(|(seed, count)| self.expected(seed, count));
        let handles = [&all[0], &all[1]].map(|step| self.forward(step));
        self.prepared(&all[0]);
        for (step, handle) in all.iter().zip(&handles) {
            self.again(step, handle);
        }
        for (step, handle) in all.iter().zip(&handles).rev() {
            self.backward(step, handle);
        }
    }
}
