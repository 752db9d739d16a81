use super::*;
use proptest::prelude::*;

const META: &str = r#"{"type": "meta", "model": "small", "num_experts": 8, "top_k": 2}"#;

fn token(ids: &[i32], weights: &[f32]) -> String {
    format!(r#"{{"token":0,"topk_ids":{ids:?},"topk_weights":{weights:?}}}"#)
}

fn parse(lines: &[&str]) -> Result<Recorded, RecordedError> {
    Recorded::parse(&lines.join("\n"))
}

fn simple(ids: [i32; 2]) -> String {
    token(&ids, &[0.5, 0.5])
}

#[test]
fn the_meta_line_and_its_tokens_are_read() {
    let recorded = parse(&[META, &token(&[7, 0], &[0.75, 0.25]), &token(&[-1, 3], &[0.0, 1.0]), ""]).unwrap();
    assert_eq!((recorded.experts(), recorded.top_k(), recorded.tokens()), (Some(8), 2, 2));
    let routing = recorded.routing(0, 2).unwrap();
    assert_eq!(routing.experts(), [7, 0, -1, 3]);
    assert_eq!(routing.weights(), [0.75, 0.25, 0.0, 1.0]);
}

#[test]
fn without_a_meta_line_the_first_token_decides_top_k() {
    let recorded = parse(&[&simple([70, 1])]).unwrap();
    assert_eq!((recorded.experts(), recorded.top_k()), (None, 2));
}

#[test]
fn a_malformed_line_is_named_by_its_number_and_column() {
    let error = parse(&[META, "", &simple([0, 1]), "{\"topk_ids\":[1,x]"]).unwrap_err();
    let RecordedError::Malformed { line: 4, column: 16, problem } = &error else { panic!("{error:?}") };
    assert!(!problem.contains("line"), "one position only: {problem}");
    assert_eq!(error.to_string(), "line 4, column 16: expected value");
}

#[test]
fn a_missing_key_is_named() {
    let error = parse(&[r#"{"topk_ids":[1,2]}"#]).unwrap_err();
    assert!(error.to_string().contains("line 1") && error.to_string().contains("topk_weights"), "{error}");
}

#[test]
fn lines_of_different_length_are_refused() {
    let error = parse(&[&simple([0, 1]), &token(&[1], &[1.0])]).unwrap_err();
    assert_eq!(error, RecordedError::WrongLength { line: 2, what: "ids", seen: 1, expected: 2 });
    let error = parse(&[META, &token(&[1, 2], &[1.0])]).unwrap_err();
    assert_eq!(error, RecordedError::WrongLength { line: 2, what: "weights", seen: 1, expected: 2 });
    let error = parse(&[&token(&[], &[])]).unwrap_err();
    assert_eq!(error, RecordedError::WrongLength { line: 1, what: "ids", seen: 0, expected: 1 });
}

#[test]
fn ids_outside_the_experts_and_experts_named_twice_are_refused() {
    let error = parse(&[META, &simple([1, 8])]).unwrap_err();
    assert_eq!(error, RecordedError::OutOfRange { line: 2, expert: 8, experts: 8 });
    let error = parse(&[&simple([1, -2])]).unwrap_err();
    assert!(matches!(error, RecordedError::OutOfRange { line: 1, expert: -2, .. }));
    assert_eq!(parse(&[&simple([3, 3])]).unwrap_err(), RecordedError::Twice { line: 1, expert: 3 });
    assert!(parse(&[&simple([-1, -1])]).is_ok(), "dropped choices may repeat");
}

#[test]
fn a_file_without_tokens_is_refused() {
    for text in ["", "\n\n", META] {
        assert_eq!(Recorded::parse(text).unwrap_err(), RecordedError::Empty);
    }
}

#[test]
fn the_file_and_the_caller_must_agree() {
    let recorded = parse(&[META, &simple([0, 5])]).unwrap();
    assert_eq!(recorded.require(None, None), Ok(()));
    assert_eq!(recorded.require(Some(8), Some(2)), Ok(()));
    let error = recorded.require(Some(64), None).unwrap_err();
    assert_eq!(error, RecordedError::Contradiction { what: "num_experts", file: 8, wanted: 64 });
    let error = recorded.require(None, Some(4)).unwrap_err();
    assert_eq!(error, RecordedError::Contradiction { what: "top_k", file: 2, wanted: 4 });
}

#[test]
fn without_a_meta_line_the_callers_experts_must_hold_every_id() {
    let recorded = parse(&[&simple([0, 5]), &simple([9, 1]), &simple([1, 9])]).unwrap();
    assert_eq!(recorded.require(Some(10), None), Ok(()));
    let error = recorded.require(Some(9), None).unwrap_err();
    assert_eq!(error, RecordedError::OutOfRange { line: 2, expert: 9, experts: 9 });
}

proptest! {
    #[test]
    fn a_recording_wraps_around(tokens in 1usize..9, first: u64, wanted in 0u32..30) {
        let lines: Vec<String> = (0..tokens).map(|t| simple([t as i32, 100])).collect();
        let recorded = Recorded::parse(&lines.join("\n")).unwrap();
        let routing = recorded.routing(first, wanted).unwrap();
        prop_assert_eq!(routing.tokens(), wanted);
        for t in 0..wanted {
            let expected = (u128::from(first) + u128::from(t)) % tokens as u128;
            prop_assert_eq!(routing.experts_of(t), [expected as i32, 100]);
        }
    }
}
