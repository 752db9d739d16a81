//! Tensors of a rank, and the place of each of their values in the whole tensor.
//!
//! Whole tensors are those of the [plain model](crate::weights). A rank's part of one is some rows
//! and some columns, transposed where a linear layer of `sidelane-parallel` has outputs first:
//!
//! ```text
//!   token    [vocabulary, width]   rows of a part of the vocabulary       cut over tp
//!   qkv.n    [width, qkv width]    columns of some heads, transposed      cut over tp
//!   out.n    [width, width]        rows of some heads, transposed         cut over tp
//!   head     [width, vocabulary]   columns of the vocabulary, transposed  cut over tp
//!   place    [window, width]       whole                                  the same on all ranks of a stage
//!   router.n [width, experts]      whole                                  the same on all ranks of a stage
//!   gate.n.e, up.n.e, down.n.e     whole, of some experts                 cut over ep
//! ```
//!
//! Tied, the head is `token`, which the last stage has, too.
//!
//! Gradients of the three kinds are added over different ranks: [`Sections`].

use std::ops::Range;

use super::strategy::Strategy;
use crate::settings::Shape;

/// One value for each kind of tensors, by the ranks that have the same values.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sections<T> {
    /// Of tensors that are cut over tp: the same on the ranks of dp x cp.
    pub cut: T,
    /// Of tensors that are whole: the same on the ranks of dp x cp x tp.
    pub whole: T,
    /// Of experts: the same on the ranks of edp.
    pub experts: T,
}

/// Values of each kind of tensors, one after another.
pub type Rows = Sections<Vec<f32>>;

impl<T> Sections<T> {
    /// The same of each.
    pub fn map<U>(self, mut each: impl FnMut(T) -> U) -> Sections<U> {
        Sections { cut: each(self.cut), whole: each(self.whole), experts: each(self.experts) }
    }

    /// References to each.
    pub fn as_ref(&self) -> Sections<&T> {
        Sections { cut: &self.cut, whole: &self.whole, experts: &self.experts }
    }

    /// References to each, to change them.
    pub fn as_mut(&mut self) -> Sections<&mut T> {
        Sections { cut: &mut self.cut, whole: &mut self.whole, experts: &mut self.experts }
    }

    /// Pairs of each.
    pub fn zip<U>(self, other: Sections<U>) -> Sections<(T, U)> {
        Sections {
            cut: (self.cut, other.cut),
            whole: (self.whole, other.whole),
            experts: (self.experts, other.experts),
        }
    }
}

impl<T, E> Sections<std::result::Result<T, E>> {
    /// All, or the first error.
    ///
    /// # Errors
    /// That of the first.
    pub fn all(self) -> std::result::Result<Sections<T>, E> {
        Ok(Sections { cut: self.cut?, whole: self.whole?, experts: self.experts? })
    }
}

/// A rank's part of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Its name in checkpoints.
    pub name: String,
    /// Rows and columns of the whole tensor.
    pub shape: [usize; 2],
    rows: Range<usize>,
    /// Ascending.
    columns: Vec<usize>,
    transposed: bool,
}

impl Tensor {
    fn whole(name: String, shape: [usize; 2]) -> Tensor {
        let [rows, columns] = shape;
        Tensor { name, shape, rows: 0..rows, columns: (0..columns).collect(), transposed: false }
    }

    /// Number of values.
    pub fn elements(&self) -> usize {
        self.rows.len() * self.columns.len()
    }

    /// Which of this part's values has a place in the whole tensor; none if it is of another part.
    pub fn nth(&self, place: usize) -> Option<usize> {
        let (columns, [_, width]) = (&self.columns, self.shape);
        let row = (place / width).checked_sub(self.rows.start).filter(|row| *row < self.rows.len())?;
        let column = columns.binary_search(&(place % width)).ok()?;
        Some(if self.transposed { column * self.rows.len() + row } else { row * columns.len() + column })
    }

    /// The place of each value in the whole tensor.
    pub fn places(&self) -> impl Iterator<Item = usize> {
        let columns = &self.columns;
        let ([_, width], first) = (self.shape, self.rows.start);
        let rows = self.rows.len();
        (0..self.elements()).map(move |nth| {
            let (row, column) = if self.transposed {
                (nth % rows, nth / rows)
            } else {
                (nth / columns.len(), nth % columns.len())
            };
            (first + row) * width + columns[column]
        })
    }
}

/// The place of a rank in its mesh, as far as its tensors depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Place {
    /// Its stage of the pipeline.
    pub stage: usize,
    /// Its part of matrices.
    pub tp: usize,
    /// Its part of experts.
    pub ep: usize,
}

/// Part `nth` of `parts` of so many.
pub fn part(count: usize, nth: usize, parts: usize) -> Range<usize> {
    let each = count / parts;
    nth * each..(nth + 1) * each
}

/// Layers of a model chunk of a stage.
pub fn layers_of(strategy: &Strategy, shape: &Shape, stage: usize, chunk: usize) -> Range<usize> {
    let (stages, chunks) = (strategy.sizes.pp as usize, strategy.model_chunks() as usize);
    part(shape.layers, chunk * stages + stage, stages * chunks)
}

/// The tensors of a rank in the order of its parameters: those of each model chunk, one chunk after
/// another.
pub fn tensors_of(strategy: &Strategy, shape: &Shape, place: Place) -> Vec<Sections<Vec<Tensor>>> {
    let chunks = strategy.model_chunks() as usize;
    (0..chunks).map(|chunk| of_chunk(strategy, shape, place, chunk)).collect()
}

fn of_chunk(strategy: &Strategy, shape: &Shape, place: Place, chunk: usize) -> Sections<Vec<Tensor>> {
    let Shape { vocabulary, window, layers, width, experts, expert_width, .. } = *shape;
    let (tp, ep) = (strategy.sizes.tp as usize, strategy.sizes.ep as usize);
    let (own, vocabulary_part) = (part(width, place.tp, tp), part(vocabulary, place.tp, tp));
    let own_kv = part(shape.kv_width(), place.tp, tp);
    let held = layers_of(strategy, shape, place.stage, chunk);
    let mut sections = Sections::<Vec<Tensor>>::default();
    let token = Tensor::whole("token".into(), [vocabulary, width]);
    if held.start == 0 {
        sections.cut.push(Tensor { rows: vocabulary_part.clone(), ..token.clone() });
        sections.whole.push(Tensor::whole("place".into(), [window, width]));
    }
    for layer in held.clone() {
        let parts = [(0, &own), (width, &own_kv), (width + shape.kv_width(), &own_kv)];
        let heads = parts.into_iter().flat_map(|(first, own)| first + own.start..first + own.end);
        let qkv = Tensor::whole(format!("qkv.{layer}"), [width, shape.qkv_width()]);
        sections.cut.push(Tensor { columns: heads.collect(), transposed: true, ..qkv });
        let out = Tensor::whole(format!("out.{layer}"), [width, width]);
        sections.cut.push(Tensor { rows: own.clone(), transposed: true, ..out });
        sections.whole.push(Tensor::whole(format!("router.{layer}"), [width, experts]));
        for expert in part(experts, place.ep, ep) {
            for (name, shape) in [
                ("gate", [width, expert_width]),
                ("up", [width, expert_width]),
                ("down", [expert_width, width]),
            ] {
                sections.experts.push(Tensor::whole(format!("{name}.{layer}.{expert}"), shape));
            }
        }
    }
    if held.end == layers && shape.tied {
        // A stage with both ends of the model has one tensor for both.
        if held.start != 0 {
            sections.cut.push(Tensor { rows: vocabulary_part, ..token });
        }
    } else if held.end == layers {
        let head = Tensor::whole("head".into(), [width, vocabulary]);
        sections.cut.push(Tensor { columns: vocabulary_part.collect(), transposed: true, ..head });
    }
    sections
}
