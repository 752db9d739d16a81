//! Cross-entropy of logits that tensor parallel ranks have in parts.

/// Logits of the tokens of a cp rank.
pub struct Logits<'a> {
    /// By tp rank, `[tokens, columns]`.
    pub parts: Vec<&'a [f32]>,
    /// Different tokens of a part.
    pub columns: usize,
}

impl Logits<'_> {
    /// The sum of the losses of all tokens, and the gradients of each part if that of a token's
    /// loss is `of_loss`. Sums over ranks begin from +0, by ascending rank.
    pub fn cross_entropy(&self, targets: &[u32], of_loss: f32) -> (f64, Vec<Vec<f32>>) {
        let Logits { parts, columns } = self;
        let (mut loss, mut gradients) = (0.0, vec![Vec::new(); parts.len()]);
        for (token, &target) in targets.iter().enumerate() {
            let rows = parts.iter().map(|part| &part[token * columns..][..*columns]);
            let all = rows.clone().flatten().copied();
            let largest = all.fold(f32::NEG_INFINITY, f32::max);
            let powers: Vec<Vec<f32>> =
                rows.map(|row| row.iter().map(|logit| libm::expf(logit - largest)).collect()).collect();
            let sum = powers.iter().fold(0.0, |sum, row| sum + row.iter().sum::<f32>());
            let (owner, column) = (target as usize / columns, target as usize % columns);
            let of_target = parts[owner][token * columns + column] - largest;
            loss += f64::from(libm::logf(sum) - of_target);
            for (nth, (row, gradient)) in powers.iter().zip(&mut gradients).enumerate() {
                let of_logit = |(place, power): (usize, &f32)| {
                    let share = power / sum;
                    let share = if (nth, place) == (owner, column) { share - 1.0 } else { share };
                    share * of_loss
                };
                gradient.extend(row.iter().enumerate().map(of_logit));
            }
        }
        (loss, gradients)
    }
}
