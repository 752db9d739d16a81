//! The tensors of a tensor parallel rank, and the products and sums of all of them.

use std::ops::Range;

use sidelane::rows::{Matrix, product};

use super::super::strategy::{Sizes, Strategy};
use super::super::tensors::{Place, Sections, Tensor, tensors_of};
use crate::settings::Settings;

/// A tensor that is cut over tp.
#[derive(Clone, Copy, Debug)]
pub enum CutTensor {
    /// `[vocabulary / tp, width]`
    Token,
    /// Of a layer, `[own queries, keys and values, width]`.
    Qkv(usize),
    /// Of a layer, `[width, own queries]`.
    Out(usize),
    /// `[vocabulary / tp, width]`
    Head,
}

/// The values that a rank has of these tensors.
pub struct Cut {
    values: Vec<f32>,
    ranges: Vec<Range<usize>>,
    tied: bool,
    /// Where each value is among those of the whole tensors.
    places: Vec<usize>,
}

impl Cut {
    /// Zeros, of a rank.
    pub fn new(strategy: &Strategy, settings: &Settings, rank: usize, whole: &[&Tensor]) -> Cut {
        let sizes = Sizes { tp: strategy.sizes.tp, ..Sizes::ONE };
        let place = Place { stage: 0, tp: rank, ep: 0 };
        let (mut ranges, mut places, mut first) = (Vec::new(), Vec::new(), 0);
        let parts = tensors_of(&Strategy { sizes, ..Strategy::of(sizes) }, &settings.shape, place);
        for (tensor, whole) in parts.iter().flat_map(|Sections { cut, .. }| cut).zip(whole) {
            let of_whole = tensor.places().filter_map(|place| whole.nth(place));
            places.extend(of_whole.map(|nth| first + nth));
            ranges.push(places.len() - tensor.elements()..places.len());
            first += whole.elements();
        }
        Cut { values: vec![0.0; places.len()], ranges, tied: settings.shape.tied, places }
    }

    /// Takes its part of the values of whole tensors.
    pub fn load(&mut self, whole: &[f32]) {
        self.values.iter_mut().zip(&self.places).for_each(|(value, &place)| *value = whole[place]);
    }

    /// Puts values in the order of this part into those of whole tensors.
    pub fn scatter(&self, values: &[f32], whole: &mut [f32]) {
        self.places.iter().zip(values).for_each(|(&place, &value)| whole[place] = value);
    }

    /// Number of values.
    pub fn elements(&self) -> usize {
        self.values.len()
    }

    /// Where the values of a tensor are.
    pub fn range(&self, of: CutTensor) -> Range<usize> {
        let nth = match of {
            CutTensor::Head if self.tied => 0,
            CutTensor::Token => 0,
            CutTensor::Qkv(layer) => 1 + 2 * layer,
            CutTensor::Out(layer) => 2 + 2 * layer,
            CutTensor::Head => self.ranges.len() - 1,
        };
        self.ranges[nth].clone()
    }

    /// The values of a tensor.
    pub fn tensor(&self, of: CutTensor) -> &[f32] {
        &self.values[self.range(of)]
    }
}

/// `y = x W'` of the rows of each rank, for a weight `[outputs, inputs]`.
pub fn outputs(x: &[Vec<f32>], weight: &[f32], inputs: usize) -> Vec<Vec<f32>> {
    let columns = weight.len() / inputs;
    let of_rank = |x: &Vec<f32>| {
        let rows = x.len() / inputs;
        let mut y = vec![0.0; rows * columns];
        let weight = Matrix::new(weight, columns, inputs).transposed();
        product(&mut y, Matrix::new(x, rows, inputs), weight, false);
        y
    };
    x.iter().map(of_rank).collect()
}

/// `dx = dy W` of the rows of each rank.
pub fn of_inputs(of_y: &[Vec<f32>], weight: &[f32], outputs: usize) -> Vec<Vec<f32>> {
    let columns = weight.len() / outputs;
    let of_rank = |of_y: &Vec<f32>| {
        let rows = of_y.len() / outputs;
        let mut of_x = vec![0.0; rows * columns];
        product(&mut of_x, Matrix::new(of_y, rows, outputs), Matrix::new(weight, outputs, columns), false);
        of_x
    };
    of_y.iter().map(of_rank).collect()
}

/// `dW = dy' x` of the rows of a rank.
pub fn of_weights(of_y: &[f32], x: &[f32], (outputs, inputs): (usize, usize)) -> Vec<f32> {
    let rows = x.len() / inputs;
    let mut weight = vec![0.0; outputs * inputs];
    let of_y = Matrix::new(of_y, rows, outputs).transposed();
    product(&mut weight, of_y, Matrix::new(x, rows, inputs), false);
    weight
}

/// Sums over tp ranks, from +0 by ascending rank, of the rows of each cp rank.
pub fn sum_of_ranks(mut parts: impl Iterator<Item = Vec<Vec<f32>>>) -> Vec<Vec<f32>> {
    let first = parts.next().unwrap_or_default();
    let first = first.into_iter().map(|rows| rows.into_iter().map(|value| 0.0 + value).collect());
    parts.fold(first.collect(), |mut sums: Vec<Vec<f32>>, part| {
        for (sums, rows) in sums.iter_mut().zip(part) {
            sums.iter_mut().zip(rows).for_each(|(sum, value)| *sum += value);
        }
        sums
    })
}
