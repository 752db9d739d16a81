//! Sequence parallel layers in token chunks, against the same layers in one piece, to the bit.

use std::time::Duration;

use half::bf16;
use sidelane::collective::Communicator;
use sidelane::error::{CallError, OverlapError, PlanError};
use sidelane::overlap::{HostExecutor, TokenChunks};
use sidelane::{Error, World};
use sidelane_parallel::tensor::{
    Activations, ColumnParallelLinear, LinearGradients, LinearShape, RowParallelLinear, cut_columns, cut_rows,
};

use crate::ranks::{on_ranks, random_seed, tiny};
use crate::tensors::{Elements, WORLDS, bits, bits_of, columns, communicator, elements, tensor};

const TOKENS: usize = 24;
const INPUTS: usize = 36;
const OUTPUTS: usize = 60;
const SHAPE: LinearShape = LinearShape { inputs: INPUTS, outputs: OUTPUTS };
const WAY: Activations = Activations::SequenceParallel;
/// One, some that divide the tokens of a rank, some that do not, and more than there are.
const CHUNKS: [u32; 6] = [1, 2, 3, 4, 7, 40];

fn bits_of_all<E: Elements>(gradients: &LinearGradients<E>) -> [Option<Vec<u32>>; 3] {
    let LinearGradients { input, weight, bias } = gradients;
    [Some(bits_of(input)), Some(bits(weight)), bias.as_deref().map(bits)]
}

/// Both layers of a rank, with inputs and gradients of outputs.
struct Layers<E> {
    column: ColumnParallelLinear<E>,
    x: Vec<E>,
    of_column: Vec<E>,
    row: RowParallelLinear<E>,
    h: Vec<E>,
    of_row: Vec<E>,
}

impl<E: Elements> Layers<E> {
    fn new(world: &World, group: &mut Communicator, seed: u64) -> Self {
        let (part, ranks) = ((world.rank(), world.size()), world.size() as usize);
        let (weight, bias) = (tensor(seed, 0, OUTPUTS * INPUTS), tensor(seed, 1, OUTPUTS));
        let rows = |of: &[f32], width| cut_rows(of, width, part).unwrap().to_vec();
        let own = |of: &[f32], width: usize| {
            columns(of, width, world.rank() as usize * (width / ranks), width / ranks)
        };
        let (x, of_y) = (tensor(seed, 2, TOKENS * INPUTS), tensor(seed, 3, TOKENS * OUTPUTS));
        let of_bias = Some(rows(&bias, 1));
        let column = ColumnParallelLinear::new(group, SHAPE, WAY, rows(&weight, INPUTS), of_bias).unwrap();
        let of_weight = cut_columns(&weight, INPUTS, part).unwrap();
        let row = RowParallelLinear::new(group, SHAPE, WAY, of_weight, Some(bias)).unwrap();
        Layers {
            column: column.with_rows(),
            x: elements(&rows(&x, INPUTS)),
            of_column: elements(&own(&of_y, OUTPUTS)),
            row: row.with_rows(),
            h: elements(&own(&x, INPUTS)),
            of_row: elements(&rows(&of_y, OUTPUTS)),
        }
    }
}

fn check_chunks<E: Elements>(seed: u64) {
    for nodes in WORLDS {
        on_ranks(nodes, &tiny(), |world| {
            let mut group = communicator(&world);
            let group = &mut group;
            let Layers { column, x, of_column, row, h, of_row } = Layers::<E>::new(&world, group, seed);
            let y = column.forward(group, &x).unwrap();
            let of_x = column.backward(group, &x, &of_column).unwrap();
            let z = row.forward(group, &h).unwrap();
            let of_h = row.backward(group, &h, &of_row).unwrap();
            for count in CHUNKS {
                for overlap in [false, true] {
                    let (chunks, executor) = (TokenChunks::new(count), HostExecutor::new().overlap(overlap));
                    let case = format!("{}, {nodes:?}, {count} chunks, overlap {overlap}", E::NAME);
                    let got = column.forward_in_chunks(group, &x, chunks, &executor).unwrap();
                    assert_eq!(bits_of(&got), bits_of(&y), "{case}");
                    let got = column.backward_in_chunks(group, &x, &of_column, chunks, &executor).unwrap();
                    assert_eq!(bits_of_all(&got), bits_of_all(&of_x), "{case}");
                    let got = row.forward_in_chunks(group, &h, chunks, &executor).unwrap();
                    assert_eq!(bits_of(&got), bits_of(&z), "{case}");
                    let got = row.backward_in_chunks(group, &h, &of_row, chunks, &executor).unwrap();
                    assert_eq!(bits_of_all(&got), bits_of_all(&of_h), "{case}");
                }
            }
        });
    }
}

#[test]
fn chunks_and_overlap_change_no_bit_of_any_pass() {
    let seed = random_seed();
    check_chunks::<f32>(seed);
    check_chunks::<bf16>(seed);
}

#[test]
fn rows_of_different_elements_are_an_error_on_all_ranks() {
    on_ranks(&[0, 0, 1], &tiny(), |world| {
        let mut group = communicator(&world);
        let shape = LinearShape { inputs: 6, outputs: 3 };
        let column = ColumnParallelLinear::new(&mut group, shape, WAY, vec![1.0; 6], None).unwrap();
        let narrow = column.clone().with_rows::<bf16>();
        let executor = HostExecutor::new();
        for chunks in [1, 2].map(TokenChunks::new) {
            let error = match world.rank() {
                2 => narrow.forward_in_chunks(&mut group, &[bf16::ONE; 12], chunks, &executor).map(drop),
                _ => column.forward_in_chunks(&mut group, &[1.0; 12], chunks, &executor).map(drop),
            };
            let error = error.unwrap_err();
            assert!(matches!(error, Error::Call(CallError::Disagree { .. })), "{error}");
        }
        assert_eq!(narrow.forward(&mut group, &[bf16::ONE; 12]).unwrap(), [bf16::from_f32(6.0); 6]);
    });
}

#[test]
fn ranks_without_tokens_pass_in_chunks() {
    on_ranks(&[0, 0, 1], &tiny(), |world| {
        let mut group = communicator(&world);
        let shape = LinearShape { inputs: 6, outputs: 3 };
        let column = ColumnParallelLinear::new(&mut group, shape, WAY, vec![1.0; 6], None).unwrap();
        let (chunks, executor) = (TokenChunks::new(2), HostExecutor::new());
        assert_eq!(column.forward_in_chunks(&mut group, &[], chunks, &executor), Ok(Vec::new()));
        let gradients = column.backward_in_chunks(&mut group, &[], &[], chunks, &executor).unwrap();
        assert_eq!((gradients.input, gradients.weight), (Vec::new(), vec![0.0; 6]));
    });
}

#[test]
fn different_chunks_or_tokens_are_an_error_on_all_ranks() {
    on_ranks(&[0, 0, 1], &tiny(), |world| {
        let mut group = communicator(&world);
        let odd = world.rank() == 2;
        let shape = LinearShape { inputs: 6, outputs: 3 };
        let column = ColumnParallelLinear::new(&mut group, shape, WAY, vec![1.0; 6], None).unwrap();
        let row = RowParallelLinear::new(&mut group, shape, WAY, vec![1.0; 6], None).unwrap();
        let executor = HostExecutor::new();
        let named = |error: Error, right: &str| {
            let named =
                matches!(&error, Error::Call(CallError::ConfigsDiffer { what, .. }) if *what == right);
            assert!(named, "{error}");
        };
        let chunks = TokenChunks::new(if odd { 3 } else { 2 });
        named(
            column.forward_in_chunks(&mut group, &[1.0; 12], chunks, &executor).unwrap_err(),
            "token chunks",
        );
        named(row.forward_in_chunks(&mut group, &[1.0; 12], chunks, &executor).unwrap_err(), "token chunks");
        let x = vec![1.0; if odd { 18 } else { 12 }];
        let chunks = TokenChunks::new(4);
        let error = column.forward_in_chunks(&mut group, &x, chunks, &executor).unwrap_err();
        named(error, "tokens of a rank");
        // The plan of so many chunks would need more memory than there is.
        let chunks = TokenChunks::new(if odd { u32::MAX } else { 2 });
        let error = column.forward_in_chunks(&mut group, &[1.0; 12], chunks, &executor).unwrap_err();
        match odd {
            true => assert!(matches!(error, Error::Plan(PlanError::BadParameter { .. })), "{error}"),
            false => assert!(matches!(error, Error::Call(CallError::PeerRefused { peer: 2, .. })), "{error}"),
        }
        // One chunk has no call to compare in, so the calls differ.
        let chunks = TokenChunks::new(if odd { 1 } else { 2 });
        let error = column.forward_in_chunks(&mut group, &[1.0; 12], chunks, &executor).unwrap_err();
        assert!(matches!(error, Error::Call(CallError::Disagree { .. })), "{error}");
        assert_eq!(column.forward(&mut group, &[1.0; 12]).unwrap(), [6.0; 6]);
    });
}

#[test]
fn rank_whose_run_fails_refuses_the_next_call_and_the_pass_after_works() {
    on_ranks(&[0, 1], &tiny(), |world| {
        let mut group = communicator(&world);
        let shape = LinearShape { inputs: 6, outputs: 2 };
        let column = ColumnParallelLinear::new(&mut group, shape, WAY, vec![1.0; 6], None).unwrap();
        let (late, chunks) = (world.rank() == 1, TokenChunks::new(2));
        let alone = HostExecutor::new().overlap(false);
        // Its first node, the comparison, overruns; the gathers are left.
        let executor = if late { alone.limit(Duration::ZERO) } else { alone };
        let error = column.forward_in_chunks(&mut group, &[1.0; 12], chunks, &executor).unwrap_err();
        match late {
            true => assert!(matches!(error, Error::Overlap(OverlapError::Overran { .. })), "{error}"),
            false => assert!(matches!(error, Error::Call(CallError::PeerRefused { peer: 1, .. })), "{error}"),
        }
        let y = column.forward_in_chunks(&mut group, &[1.0; 12], chunks, &HostExecutor::new());
        assert_eq!(y.unwrap(), [6.0; 4]);
    });
}
