use super::*;

const LOGITS: [f32; 6] = [0.25, -1.0, 3.0, 3.5, -200.0, 300.0];
const MOE: [f32; 12] = [1.0, -2.0, 0.5, 3.0, 0.0, 0.0, 0.0, 0.0, 1e3, -1e-3, 7.0, 0.1];
const MLP: [f32; 12] = [0.3, 0.2, -0.1, 4.0, 5.0, -6.0, 7.0, 0.7, 2.0, 1.0, -0.5, 0.9];
const D_Y: [f32; 12] = [0.5, -0.25, 1.0, 2.0, -1.0, 0.1, 0.2, 0.3, 1.0, 2.0, 3.0, -4.0];

const RESIDUAL: Residual<'_, f32> = Residual { logits: &LOGITS, moe: &MOE, mlp: &MLP };

fn coefficients(logits: &[f64]) -> [f64; 2] {
    let [a, b] = [logits[0].exp(), logits[1].exp()];
    [a / (a + b), b / (a + b)]
}

fn reference(logits: &[f64], token: usize, column: usize) -> f64 {
    let [c0, c1] = coefficients(&logits[token * 2..]);
    f64::from(MOE[token * 4 + column]) * c0 + f64::from(MLP[token * 4 + column]) * c1
}

#[test]
fn each_product_and_the_sum_are_rounded_once() {
    let mut y = [f32::NAN; 12];
    RESIDUAL.combine(&mut y).unwrap();
    let halves = |rows: [f32; 12]| rows.map(bf16::from_f32);
    let (moe, mlp, mut narrow) = (halves(MOE), halves(MLP), [bf16::NAN; 12]);
    Residual { logits: &LOGITS, moe: &moe, mlp: &mlp }.combine(&mut narrow).unwrap();
    let logits = LOGITS.map(f64::from);
    for i in 0..12 {
        let [c0, c1] = coefficients(&logits[i / 4 * 2..]).map(|c| c as f32);
        assert_eq!(y[i], MOE[i] * c0 + MLP[i] * c1, "element {i}");
        let wide = moe[i].to_f32() * c0 + mlp[i].to_f32() * c1;
        assert_eq!(narrow[i], bf16::from_f32(wide), "element {i}");
        let exact = reference(&logits, i / 4, i % 4);
        assert!((f64::from(y[i]) - exact).abs() <= 1e-6 * (1.0 + exact.abs()));
    }
    assert_eq!(y[8..], MLP[8..], "all of it comes from the MLP");
}

#[test]
fn gradients_are_the_slopes_of_the_mixture() {
    let (mut d_logits, mut d_moe, mut d_mlp) = ([f32::NAN; 6], [f32::NAN; 12], [f32::NAN; 12]);
    let gradients = ResidualGradients { d_logits: &mut d_logits, d_moe: &mut d_moe, d_mlp: &mut d_mlp };
    RESIDUAL.backward(&D_Y, gradients).unwrap();
    let logits = LOGITS.map(f64::from);
    let loss = |logits: &[f64]| -> f64 {
        (0..12).map(|i| f64::from(D_Y[i]) * reference(logits, i / 4, i % 4)).sum()
    };
    for i in 0..6 {
        let moved = |by: f64| {
            let mut logits = logits;
            logits[i] += by;
            loss(&logits)
        };
        let slope = (moved(1e-5) - moved(-1e-5)) / 2e-5;
        assert!((f64::from(d_logits[i]) - slope).abs() < 1e-5, "logit {i}: {} {slope}", d_logits[i]);
    }
    assert!(d_logits[0].abs() > 0.05 && d_logits[2].abs() > 0.5, "{d_logits:?}");
    for i in 0..12 {
        let [c0, c1] = coefficients(&logits[i / 4 * 2..]).map(|c| c as f32);
        assert_eq!((d_moe[i], d_mlp[i]), (D_Y[i] * c0, D_Y[i] * c1), "element {i}");
    }
}

#[test]
fn bad_rows_are_refused_and_nothing_is_written() {
    let mut y = [0.5; 12];
    let shape = |result: Result<(), GateError>| match result.unwrap_err() {
        GateError::WrongShape { what, .. } => what,
        other => panic!("{other}"),
    };
    assert_eq!(shape(RESIDUAL.combine(&mut y[1..])), "y");
    assert_eq!(shape(Residual { logits: &LOGITS[1..], ..RESIDUAL }.combine(&mut y)), "logits");
    assert_eq!(shape(Residual { moe: &MOE[1..], ..RESIDUAL }.combine(&mut y)), "moe");
    assert_eq!(shape(Residual { mlp: &MLP[1..], ..RESIDUAL }.combine(&mut y)), "mlp");
    let mut logits = LOGITS;
    logits[3] = f32::NAN;
    let error = Residual { logits: &logits, ..RESIDUAL }.combine(&mut y).unwrap_err();
    assert!(matches!(error, GateError::NotFinite { token: 1, expert: 1, .. }), "{error}");
    assert_eq!(y, [0.5; 12]);
    let bytes = Residual { logits: &LOGITS, moe: &[0_u8; 12], mlp: &[0_u8; 12] };
    assert_eq!(bytes.combine(&mut [0; 12]), Err(GateError::NoArithmetic { dtype: Dtype::Bytes }));

    let (mut d_moe, mut d_mlp, mut d_logits) = ([0.5; 12], [0.5; 12], [0.5; 5]);
    let gradients = ResidualGradients { d_logits: &mut d_logits, d_moe: &mut d_moe, d_mlp: &mut d_mlp };
    assert_eq!(shape(RESIDUAL.backward(&D_Y, gradients)), "d_logits");
    assert_eq!((d_moe, d_mlp), ([0.5; 12], [0.5; 12]));
    assert_eq!(Residual::<f32> { logits: &[], moe: &[], mlp: &[] }.combine(&mut []), Ok(()));
}
